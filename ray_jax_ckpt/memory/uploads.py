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
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.storage.files import TEMPORARY, exists, is_denied, open_output, remove_file, remove_tree
from ray_jax_ckpt.storage.limiter import Limiter
from ray_jax_ckpt.storage.manifest import MANIFEST, FileRecord, Manifest
from ray_jax_ckpt.storage.ocdbt import merge_databases, write_database
from ray_jax_ckpt.storage.plan import DirectoryPlan
from ray_jax_ckpt.storage.reader import lacking
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
        driver: On whose behalf. Stores that serve a newer one refuse it.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    rebuild: Callable[[], pyarrow.fs.FileSystem] | None = field(default=None, repr=False)
    timeout_s: float = 1800.0
    driver: str = ""

    @classmethod
    def of(cls, run: RunIdentity, path: str, timeout_s: float, driver: str) -> Destination:
        """A path on the filesystem of a run."""
        assert run.filesystem is not None
        return cls(run.filesystem, path, run.rebuild, timeout_s, driver)


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

    def write(
        self, to: Destination, hold: Lease, plan: DirectoryPlan, writer: int, pace: Pace
    ) -> dict[str, FileRecord]:
        """Writes a writer's share of a generation that is leased here.

        Raises:
            PersistError: Storage did not take a file in time.
            IntegrityError: The bytes here are not those that were captured: another holder has to be asked.
            SnapshotLostError: They are not here any more, or may not have been all the time.
            StaleAttemptError: Another driver has taken the run over.
        """
        generation = hold.generation
        faults.reach("persist", generation.step)

        def read(part: str, offset: int, num_bytes: int) -> np.ndarray:
            self._check_held(hold)
            segment, start, _ = self._shelf.find(generation, part)
            return segment.view()[start + offset : start + offset + num_bytes]

        def share(filesystem: pyarrow.fs.FileSystem) -> dict[str, FileRecord]:
            effort = Effort(pace.streams, pace.retries, to.timeout_s, self._limiter(pace.bytes_per_s))
            target = Target(filesystem, to.path)
            records = write_files(target, plan.files_of(writer), read, effort)
            if writer in plan.database_writers:
                records |= write_database(target, plan, read, effort, writer=writer)
            return records

        try:
            written = self._on(to, "write", share)
        except PersistError:
            self._check_held(hold)
            raise
        # Bytes may have become another generation's between their digest and their way to storage.
        self._check_held(hold)
        faults.reach("persisted", generation.step)
        return written

    def _check_held(self, hold: Lease) -> None:
        if hold.id not in self._shelf.slots.leases:
            raise SnapshotLostError(
                f"the upload of generation {hold.generation} has given way to a kept snapshot, or to a newer upload"
            )

    def commit(self, to: Destination, plan: DirectoryPlan, records: dict[str, FileRecord], retries: int) -> None:
        """All shares are there: makes them a checkpoint.

        Raises:
            PersistError: Storage failed, or does not have what was written.
            StaleAttemptError: Another driver has taken the run over.
        """
        faults.reach("finish", plan.head.step or 0)

        def finish(filesystem: pyarrow.fs.FileSystem) -> None:
            effort, target = Effort(1, retries, to.timeout_s), Target(filesystem, to.path)
            manifest = plan.manifest(records | merge_databases(target, plan, effort))
            _check_whole(target, manifest)
            target.commit(manifest, effort)

        self._on(to, "finish", finish)

    def discard(self, to: Destination) -> None:
        """Removes what has been written of a checkpoint that is given up. Raises PersistError if it takes too long."""
        self._on(to, "discard", lambda filesystem: Target(filesystem, to.path).discard())

    def clear(self, to: Destination) -> None:
        """Removes what an earlier driver left unfinished; what is a checkpoint by now stays. Raises PersistError."""

        def act(filesystem: pyarrow.fs.FileSystem) -> None:
            if to.path.endswith(TEMPORARY) or not exists(filesystem, f"{to.path}/{MANIFEST}"):
                remove_tree(filesystem, to.path, first=MANIFEST)

        self._on(to, "clear", act)

    def remove(self, to: Destination) -> None:
        """Removes a checkpoint, its manifest first. Raises PersistError."""
        self._on(to, "remove", lambda filesystem: remove_tree(filesystem, to.path, first=MANIFEST))

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
        except Exception as error:
            # Filesystems of users raise what they like.
            raise PersistError(f"{to.path} cannot be used to try whether storage is shared: {error}") from error

    def _limiter(self, bytes_per_s: float | None) -> Limiter:
        with self._lock:
            return self._limiters.setdefault(bytes_per_s, Limiter(bytes_per_s))

    def _on(self, to: Destination, what: str, action: Callable[[pyarrow.fs.FileSystem], _T]) -> _T:
        """Does something on the filesystem, bounded; once more with a new one if it says that access is denied."""
        if what != "discard":
            # It only removes what a try of its own has left.
            slots_.check_driver(self._shelf.slots, to.driver)
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


def _check_whole(target: Target, manifest: Manifest) -> None:
    """Somebody may have removed files meanwhile; and where nodes have disks of their own, each has only its share."""
    missing = lacking(target.filesystem, target.base, manifest)
    if missing:
        raise PersistError(
            f"{target.base} lacks {len(missing)} of {len(manifest.files)} files that have been written: "
            f"{', '.join(missing[:3])}. Somebody removes them, or RunConfig.storage_path is not on a disk that all "
            "nodes share."
        )


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
