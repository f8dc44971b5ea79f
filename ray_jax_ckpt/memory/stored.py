"""A run's checkpoints on storage, as its coordinator knows them: what is there, and which one would be restored."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError, NoCheckpointError, RestoreError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.memory.messages import RunIdentity, StoredPlace
from ray_jax_ckpt.model.persistence import Persisted
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.reader import lacking, read_manifest
from ray_jax_ckpt.storage.runs import checkpoint_path, directories, is_named_here, is_temporary
from ray_jax_ckpt.storage.streams import ASK_S, Deadline, ask

logger = logging.getLogger(__name__)


@dataclass
class _Listing:
    """What lies in a run's directory of checkpoints.

    Attributes:
        found: With a manifest.
        unfinished: Directories without.
        unread: Directories of which storage does not say whether they have one, and why.
    """

    found: list[Persisted] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)


class Stored:
    """For use in one event loop. Storage is only ever waited for by those who say how long.

    Attributes:
        known: By generation.
        bad: Paths that somebody could not restore: not offered again.
        unfinished: Directories that earlier drivers have left and that are no checkpoints.
    """

    def __init__(self, run: RunIdentity) -> None:
        self._run = run
        self._looking: asyncio.Task[None] | None = None
        self._problem = "it has not been listed yet"
        self.known: dict[Generation, Persisted] = {}
        self.bad: set[str] = set()
        self.unfinished: set[str] = set()

    def new_path(self, generation: Generation) -> str:
        """Directory for a try to write a generation's checkpoint."""
        return checkpoint_path(self._run.path, generation)

    def suspect(self, path: str, said: str) -> None:
        """Somebody could not restore what lies there: it is not offered again."""
        self.bad.add(path)
        for generation in [one.generation for one in self.known.values() if one.path == path]:
            logger.warning("The checkpoint %s could not be restored and is passed over from now on: %s", path, said)
            del self.known[generation]

    async def look_back(self, timeout_s: float) -> None:
        """Waits until it is known what earlier drivers of this run have left, at most so long. Never raises.

        What could not be read is looked at again.
        """
        if self._run.filesystem is None or not self._problem:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(self._run.filesystem))
        done, _ = await asyncio.wait([self._looking], timeout=timeout_s)
        if not done:
            logger.warning("Storage did not say within %g s which checkpoints of this run are there.", timeout_s)

    async def _look(self, filesystem: pyarrow.fs.FileSystem) -> None:
        try:
            listing = await asyncio.to_thread(_listed, filesystem, self._run.path)
        except Exception as error:
            # Filesystems of users raise what they like.
            self._problem = f"{type(error).__name__}: {error}"
            logger.warning("The run's checkpoints on storage could not be listed: %s", self._problem)
            return
        self._problem = "; ".join(f"{path}: {why}" for path, why in listing.unread.items())
        self.known = {one.generation: one for one in listing.found if one.path not in self.bad} | self.known
        self.unfinished = listing.unfinished

    async def newest(self, newer_than: Generation | None, timeout_s: float) -> StoredPlace | None:
        """The newest checkpoint that is whole, as far as a listing tells, and newer than what memory has.

        Digests are compared while it is read; see `suspect`. Waits for storage at most `timeout_s` for each.

        Raises:
            RestoreError: There is nothing to restore, in memory or on storage, as far as this could be read; but there
                may be something that could not be. To start afresh then would be to lose the run.
        """
        filesystem = self._run.filesystem
        if filesystem is None:
            return None
        unread = self._problem
        for generation in sorted(self.known, reverse=True):
            if newer_than is not None and generation <= newer_than:
                break
            path = self.known[generation].path
            try:
                problem = await asyncio.wait_for(asyncio.to_thread(_problem_of, filesystem, path), timeout_s)
            except (TimeoutError, StorageError, RestoreTimeoutError) as error:
                # It may be whole: not for good.
                unread = f"{path}: {error or f'storage did not show it within {timeout_s:g} s'}"
                logger.warning("The checkpoint %s is passed over this time, since it cannot be read: %s", path, error)
                continue
            if not problem:
                return StoredPlace(generation, path, filesystem)
            self.suspect(path, problem)
        if newer_than is None and unread:
            raise RestoreError(
                f"What this run has on storage cannot be read ({unread:.1000}), and memory holds nothing. Failing this "
                "attempt instead of starting from the beginning. If there is nothing to go on from, use another name= "
                "for the run, or remove what cannot be read."
            )
        return None


def _listed(filesystem: pyarrow.fs.FileSystem, run_path: str) -> _Listing:
    listing, deadline = _Listing(), Deadline.after(ASK_S)
    for path in ask(lambda: directories(filesystem, run_path), f"Listing the checkpoints of {run_path}", deadline):
        ours = {path} if is_named_here(path) else set[str]()
        if is_temporary(path):
            listing.unfinished |= ours
            continue
        try:
            manifest = read_manifest(filesystem, path, deadline)
            listing.found.append(Persisted(manifest.generation, manifest.metrics.get(0, {}), path))
        except NoCheckpointError:
            listing.unfinished |= ours
        except (StorageError, RestoreTimeoutError) as error:
            listing.unread[path] = str(error)
        except CheckpointError as error:
            logger.warning("Passed over the checkpoint %s: %s", path, error)
    return listing


def _problem_of(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Why a checkpoint cannot be restored; "" if it seems to be whole. Raises StorageError, RestoreTimeoutError."""
    try:
        missing = lacking(filesystem, path, read_manifest(filesystem, path))
    except (StorageError, RestoreTimeoutError):
        raise
    except CheckpointError as error:
        return str(error)
    return f"{len(missing)} of its files are not as they were written: {', '.join(missing[:3])}" if missing else ""
