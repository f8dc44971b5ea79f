"""Checkpoints of this package that were reported through Ray, as a run's coordinator finds them: Ray copies them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError, NoCheckpointError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.filesystem import directory_names, join
from ray_jax_ckpt.storage.inventory import REPORTED
from ray_jax_ckpt.storage.manifest import FOLDER
from ray_jax_ckpt.storage.reader import read_manifest
from ray_jax_ckpt.storage.streams import Deadline, ask

logger = logging.getLogger(__name__)

# Only the newest is wanted, and a run may have thousands. Ray's names sort by age.
MAX_LOOKED_AT = 16


@dataclass(frozen=True)
class _Look:
    """What was found.

    Attributes:
        manifests: Generation of each directory that has a manifest, by path.
        unread: What could not be read, and why.
    """

    manifests: dict[str, Generation] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


class Reports:
    """For use in one event loop.

    Attributes:
        found: Path by generation. Whether all of its files are there is not known.
        problem: Why there may be more; "" if there is not.
    """

    def __init__(self, run: RunIdentity) -> None:
        self._run = run
        self._known: dict[str, Generation] = {}
        self._extra: set[str] = set()
        self.found: dict[Generation, str] = {}
        self.problem = ""

    def told_of(self, path: str) -> None:
        """Something was reported to there, under whatever name."""
        self._extra.add(path.rstrip("/"))
        # Under a name that was there before it is another one now.
        self._known.pop(path.rstrip("/"), None)

    async def look(self, timeout_s: float) -> None:
        """Lists the run's directory again, for at most so long. Never raises."""
        filesystem = self._run.filesystem
        if filesystem is None:
            return
        deadline = Deadline.after(timeout_s)
        work = asyncio.to_thread(_look, filesystem, self._run.path, dict(self._known), frozenset(self._extra), deadline)
        try:
            look = await asyncio.wait_for(work, timeout_s + 1)
        except Exception as error:
            # Filesystems of users raise what they like.
            self.problem = f"{self._run.path}: {error or f'not listed within {timeout_s:g} s'}"
            logger.warning("The checkpoints that were reported could not be listed: %s", self.problem)
            return
        self._known, self.problem = look.manifests, "; ".join(look.unread)
        self.found = {generation: path for path, generation in sorted(look.manifests.items())}


def _look(
    filesystem: pyarrow.fs.FileSystem,
    run_path: str,
    known: Mapping[str, Generation],
    extra: frozenset[str],
    deadline: Deadline,
) -> _Look:
    names = {*ask(lambda: directory_names(filesystem, run_path), f"Listing {run_path}", deadline)} - {FOLDER}
    # Directories of somebody else crowd out none that have the names that Ray gives.
    names = sorted(names, key=lambda name: (REPORTED.fullmatch(name) is not None, name), reverse=True)
    paths = [join(run_path, name) for name in names if not name.startswith(".")]
    look = _Look()
    for path in [*sorted(extra.intersection(paths)), *paths[:MAX_LOOKED_AT]]:
        try:
            look.manifests[path] = known.get(path) or read_manifest(filesystem, path, deadline.again()).generation
        except NoCheckpointError:
            logger.debug("%s is none of this package's, or still being copied.", path)
        except (StorageError, RestoreTimeoutError) as error:
            look.unread.append(f"{path}: {error}")
        except CheckpointError as error:
            logger.warning("Passed over the checkpoint %s: %s", path, error)
    return look
