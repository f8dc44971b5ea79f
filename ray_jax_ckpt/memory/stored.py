"""A run's checkpoints on storage, as its coordinator knows them: what is there, and which one would be restored."""

from __future__ import annotations

import asyncio
import logging

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.memory.messages import RunIdentity, StoredPlace
from ray_jax_ckpt.model.persistence import Persisted
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.reader import lacking, read_manifest
from ray_jax_ckpt.storage.runs import checkpoint_path, find_checkpoints

logger = logging.getLogger(__name__)


class Stored:
    """For use in one event loop. Storage is only ever waited for by those who say how long.

    Attributes:
        known: By generation.
    """

    def __init__(self, run: RunIdentity) -> None:
        self._run = run
        self._bad: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self.known: dict[Generation, Persisted] = {}

    def path(self, generation: Generation) -> str:
        """Directory of a generation's checkpoint."""
        return checkpoint_path(self._run.path, generation)

    def suspect(self, path: str, said: str) -> None:
        """Somebody could not restore what lies there: it is not offered again."""
        for generation in [one for one in self.known if self.path(one) == path]:
            logger.warning("The checkpoint %s could not be restored and is passed over from now on: %s", path, said)
            self._bad.add(path)
            del self.known[generation]

    async def look_back(self, timeout_s: float) -> None:
        """Waits until it is known what earlier drivers of this run have left, at most so long. Never raises."""
        if self._run.filesystem is None:
            return
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        done, _ = await asyncio.wait([self._looking], timeout=timeout_s)
        if not done:
            logger.warning("Storage did not say within %g s which checkpoints of this run are there.", timeout_s)

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._list)
        except Exception as error:
            # Filesystems of users raise what they like.
            logger.warning("The run's checkpoints on storage could not be listed: %s", error)
            return
        self.known = {one.generation: one for one in found} | self.known

    def _list(self) -> list[Persisted]:
        assert self._run.filesystem is not None
        manifests = [manifest for _, manifest in find_checkpoints(self._run.filesystem, self._run.path)]
        return [Persisted(one.generation, one.metrics.get(0, {})) for one in manifests]

    async def newest(self, newer_than: Generation | None, timeout_s: float) -> StoredPlace | None:
        """The newest checkpoint that is whole, as far as a listing tells, and newer than what memory has.

        Digests are compared while it is read; see `suspect`. Waits for storage at most `timeout_s`.
        """
        for generation in sorted(self.known, reverse=True):
            if newer_than is not None and generation <= newer_than:
                break
            try:
                problem = await asyncio.wait_for(asyncio.to_thread(self._problem, generation), timeout_s)
            except TimeoutError:
                problem = f"storage did not show it within {timeout_s:g} s"
            if not problem:
                assert self._run.filesystem is not None
                return StoredPlace(generation, self.path(generation), self._run.filesystem)
            self.suspect(self.path(generation), problem)
        return None

    def _problem(self, generation: Generation) -> str:
        """Why a checkpoint cannot be restored; "" if it seems to be whole."""
        filesystem, path = self._run.filesystem, self.path(generation)
        assert filesystem is not None
        try:
            missing = lacking(filesystem, path, read_manifest(filesystem, path))
        except (CheckpointError, OSError) as error:
            return str(error)
        return f"{len(missing)} of its files are not as they were written: {', '.join(missing[:3])}" if missing else ""
