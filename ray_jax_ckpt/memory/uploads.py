"""What a store does for storage: it writes its share of a checkpoint from its memory, and finishes or removes one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import pyarrow.fs

from ray_jax_ckpt.errors import PersistError, SnapshotLostError
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.storage.files import exists, is_denied, open_output, remove_file, remove_tree
from ray_jax_ckpt.storage.limiter import Limiter
from ray_jax_ckpt.storage.manifest import MANIFEST, FileRecord
from ray_jax_ckpt.storage.ocdbt import merge_databases, write_database
from ray_jax_ckpt.storage.plan import DirectoryPlan
from ray_jax_ckpt.storage.runs import find_unfinished
from ray_jax_ckpt.storage.writer import Effort, Target, write_files

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint goes.

    Attributes:
        filesystem: The run's.
        path: Of the checkpoint.
        rebuild: Makes the filesystem anew, with credentials of today; None where nobody knows how.
        timeout_s: Bound of each step.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    rebuild: Callable[[], pyarrow.fs.FileSystem] | None = field(default=None, repr=False)
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class Pace:
    """How a store writes: see `PersistConfig`."""

    streams: int
    retries: int
    bytes_per_s: float | None


class Uploads:
    """One store's, used by several threads at once.

    Args:
        shelf: Where the bytes are.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._limiters: dict[float | None, Limiter] = {}
        self._rebuilt: dict[str, pyarrow.fs.FileSystem] = {}
        self._lock = threading.Lock()

    def prepare(self, to: Destination) -> None:
        """Makes way for a checkpoint: what an earlier try left is removed. Raises PersistError."""
        self._on(to, "prepare", lambda filesystem: Target(filesystem, to.path).prepare(overwrite=True))

    def write(
        self, to: Destination, hold: Lease, plan: DirectoryPlan, writer: int, pace: Pace
    ) -> dict[str, FileRecord]:
        """Writes a writer's share of a generation that is leased here.

        Raises:
            PersistError: Storage did not take a file in time.
            IntegrityError: The bytes here are not those that were captured: another holder has to be asked.
            SnapshotLostError: They are not here any more, or may not have been all the time.
        """
        generation = hold.generation
        faults.reach("persist", generation.step)

        def read(part: str, offset: int, num_bytes: int) -> np.ndarray:
            segment, start, _ = self._shelf.find(generation, part)
            return segment.view()[start + offset : start + offset + num_bytes]

        def share(filesystem: pyarrow.fs.FileSystem) -> dict[str, FileRecord]:
            effort = Effort(pace.streams, pace.retries, to.timeout_s, self._limiter(pace.bytes_per_s))
            target = Target(filesystem, to.path)
            records = write_files(target, plan.files_of(writer), read, effort)
            if writer in plan.database_writers:
                records |= write_database(target, plan, read, effort, writer=writer)
            return records

        written = self._on(to, "write", share)
        # Bytes may have become another generation's between their digest and their way to storage.
        if hold.id not in self._shelf.slots.leases:
            raise SnapshotLostError(f"the upload of generation {generation} has given way to a snapshot that is kept")
        faults.reach("persisted", generation.step)
        return written

    def commit(self, to: Destination, plan: DirectoryPlan, records: dict[str, FileRecord], retries: int) -> None:
        """All shares are there: makes them a checkpoint. Raises PersistError."""
        faults.reach("finish", plan.head.step or 0)

        def finish(filesystem: pyarrow.fs.FileSystem) -> None:
            effort, target = Effort(1, retries, to.timeout_s), Target(filesystem, to.path)
            target.commit(plan.manifest(records | merge_databases(target, plan, effort)), effort)

        self._on(to, "finish", finish)

    def discard(self, to: Destination) -> None:
        """Removes what has been written of a checkpoint that is given up. Raises PersistError if it takes too long."""
        self._on(to, "discard", lambda filesystem: Target(filesystem, to.path).discard())

    def remove(self, to: Destination) -> None:
        """Removes a checkpoint, its manifest first. Raises PersistError."""
        self._on(to, "remove", lambda filesystem: remove_tree(filesystem, to.path, first=MANIFEST))

    def sweep(self, to: Destination, older_than: Generation) -> list[str]:
        """Removes what is unfinished of a run's checkpoints, and older. Returns the paths. Raises PersistError.

        Args:
            to: The run's directory.
            older_than: A checkpoint that is complete.
        """

        def remove(filesystem: pyarrow.fs.FileSystem) -> list[str]:
            found = list(find_unfinished(filesystem, to.path, older_than))
            for path in found:
                remove_tree(filesystem, path, first=MANIFEST)
            return found

        return self._on(to, "sweep", remove)

    def probe(self, to: Destination, what: Literal["write", "look", "remove"]) -> bool:
        """Writes, looks for, or removes a small file. Returns whether it is there. Raises PersistError."""

        def act(filesystem: pyarrow.fs.FileSystem) -> bool:
            if what == "write":
                with open_output(filesystem, to.path) as stream:
                    # Not empty: some object stores do not take what is.
                    stream.write(b"Whether all nodes see this.")
            elif what == "remove":
                remove_file(filesystem, to.path)
                return False
            return exists(filesystem, to.path)

        try:
            return self._on(to, f"{what} the probe", act)
        except PersistError:
            raise
        except OSError as error:
            raise PersistError(f"{to.path} cannot be used to try whether storage is shared: {error}") from error

    def _limiter(self, bytes_per_s: float | None) -> Limiter:
        with self._lock:
            return self._limiters.setdefault(bytes_per_s, Limiter(bytes_per_s))

    def _on(self, to: Destination, what: str, action: Callable[[pyarrow.fs.FileSystem], _T]) -> _T:
        """Does something on the filesystem, bounded; once more with a new one if it says that access is denied."""
        key = repr(to.rebuild)
        filesystem = self._rebuilt.get(key, to.filesystem)
        try:
            return _bounded(lambda: action(filesystem), f"{what} {to.path}", to.timeout_s)
        except (OSError, PersistError) as error:
            if to.rebuild is None or not is_denied(error):
                raise
            logger.warning("Storage denies access (%s): trying again with a filesystem that is made anew.", error)
        rebuild = to.rebuild
        filesystem = _bounded(rebuild, f"make the filesystem of {to.path} anew", to.timeout_s)
        result = _bounded(lambda: action(filesystem), f"{what} {to.path}", to.timeout_s)
        self._rebuilt[key] = filesystem
        return result


def _bounded(action: Callable[[], _T], what: str, timeout_s: float) -> _T:
    """Waits for something that a filesystem may never return from, in a daemon thread that is left behind then."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="rjc-storage", daemon=True).start()
    try:
        return outcome.result(timeout_s + 1.0)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise PersistError(
            f"Storage did not {what} within {timeout_s:g} s. Raise PersistConfig.timeout_s if it is only slow."
        ) from error
