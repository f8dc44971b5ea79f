"""Writes planned files to any pyarrow filesystem: in parallel, digested on the way, each tried again when it fails.

Bytes go from the generation's memory into the filesystem's stream; there is no copy of the state and no temporary
directory. What has been written counts only once the manifest is there, so whatever is left of a failed or killed write
is no checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from ray_jax_ckpt.digest import Digester
from ray_jax_ckpt.errors import IntegrityError, PersistError, PersistExistsError
from ray_jax_ckpt.storage.files import (
    TEMPORARY,
    exists,
    for_small_files,
    is_permanent,
    open_output,
    remove_file,
    remove_tree,
    renames,
)
from ray_jax_ckpt.storage.limiter import Limiter
from ray_jax_ckpt.storage.manifest import BLOCK_BYTES, FOLDER, MANIFEST, FileRecord, Manifest
from ray_jax_ckpt.storage.plan import PlannedFile
from ray_jax_ckpt.storage.spares import spare
from ray_jax_ckpt.storage.streams import join_all

logger = logging.getLogger(__name__)

Read = Callable[[str, int, int], np.ndarray]
"""Called as `read(part, offset, num_bytes)` from several threads; returns these bytes of the generation, as uint8."""

_CHUNK_BYTES = 8 << 20  # divides BLOCK_BYTES; S3 takes parts of 5 MiB or more
_SMALL_PER_STREAM = 4
_FIRST_DELAY_S, _MAX_DELAY_S = 0.2, 30.0
_GRACE_S = 5.0


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        streams: Files that are written at the same time; of those below 8 MiB, which mostly wait, four times as many.
        retries: How often a file is tried again.
        timeout_s: For everything.
        limiter: Bound on the bandwidth, shared with whoever has the same one.
    """

    streams: int = 4
    retries: int = 3
    timeout_s: float = 3600.0
    limiter: Limiter = field(default_factory=lambda: Limiter(None))


class Target:
    """A directory that becomes a checkpoint.

    On filesystems that rename, it is written under a name that says it is not done, and gets its own at the end. Safe
    for use from one thread; several processes may write into one.

    Args:
        filesystem: Where.
        path: Of the checkpoint. Two generations never share a directory, nor do two tries of which the first may still
            be under way somewhere.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path.rstrip("/")
        self.base = self.path + TEMPORARY if renames(filesystem) else self.path
        self._sink = for_small_files(filesystem)

    def open(self, path: str) -> Any:
        """A stream into a file of the directory."""
        return open_output(self._sink, f"{self.base}/{path}")

    def prepare(self, *, overwrite: bool = False) -> None:
        """Removes what an earlier try left. Called once, before anybody writes.

        Raises:
            PersistExistsError: There is something at the path already, and it is not to be overwritten.
            PersistError: The storage cannot be looked at.
        """
        try:
            if not overwrite and self._is_taken():
                raise PersistExistsError(
                    f"{self.path} is there already. Choose another directory or step, or overwrite it."
                )
            if self.base != self.path or exists(self.filesystem, self.base):
                remove_tree(self.filesystem, self.base, first=MANIFEST)
        except PersistExistsError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise PersistError(f"{self.path} cannot be written: {error}") from error

    def _is_taken(self) -> bool:
        """Whether something is there that is not what an earlier try of ours left."""
        if exists(self.filesystem, f"{self.path}/{MANIFEST}"):
            return True
        # Where all is written in place, anything else may be left of a try.
        sign = self.path if self.base != self.path else f"{self.path}/_METADATA"
        return exists(self.filesystem, sign) and not exists(self.filesystem, f"{self.path}/{FOLDER}")

    def commit(self, manifest: Manifest, effort: Effort = Effort()) -> None:
        """Makes it a checkpoint: writes the manifest, and gives the directory its name. Called by one process.

        Raises:
            PersistError: That failed.
        """
        content = manifest.to_bytes()
        written = PlannedFile(MANIFEST, len(content), "", content=content)
        write_files(self, [written], no_bytes, effort)
        if self.base != self.path:
            try:
                self._rename()
            except (OSError, pa.ArrowException) as error:
                raise PersistError(f"{self.base} is written, and cannot be renamed to {self.path}: {error}") from error

    def _rename(self) -> None:
        """What is to be overwritten goes only when its successor has its place."""
        old = spare(self.path)
        remove_tree(self.filesystem, old, first=MANIFEST)
        if exists(self.filesystem, self.path):
            self.filesystem.move(self.path, old)
        self.filesystem.move(self.base, self.path)
        remove_tree(self.filesystem, old, first=MANIFEST)

    def discard(self) -> None:
        """Removes what was written, as far as possible. Never raises."""
        try:
            remove_tree(self.filesystem, self.base, first=MANIFEST)
        except Exception as error:
            logger.warning("Could not remove the unfinished checkpoint %s: %s", self.base, error)


def no_bytes(part: str, offset: int, num_bytes: int) -> np.ndarray:
    """The `Read` of files whose contents are in the plan."""
    raise AssertionError("a file without pieces was asked for bytes")


def write_files(
    target: Target, files: Sequence[PlannedFile], read: Read, effort: Effort = Effort()
) -> dict[str, FileRecord]:
    """Writes files below `target.base`: one of our own, and when that is there the others, the largest first.

    Blocks; the work is done in threads.

    Returns:
        Size and digest of each, by path.

    Raises:
        PersistError: One could not be written, or not in time; the others are not begun then.
        IntegrityError: The bytes in memory are not those that were captured.
    """
    if any(file.in_database for file in files):
        raise ValueError("entries of a database are no files")
    job = _Job(target, read, effort)
    # Who finds the directory of a writer that was killed must not take it for another program's, which has no manifest:
    # one file of ours is there before anything else.
    ours = min((file for file in files if file.path.startswith(FOLDER)), key=lambda file: file.size, default=None)
    records = {} if ours is None else job.run([ours])
    rest = [file for file in files if file is not ours]
    return records | job.run(sorted(rest, key=lambda file: -file.size)) if rest else records


class _Job:
    """One call of `write_files`.

    Its threads are daemons: a call of a filesystem that never returns must not keep the process from ending.
    """

    def __init__(self, target: Target, read: Read, effort: Effort) -> None:
        self._target, self._read, self._effort = target, read, effort
        self._deadline = time.monotonic() + effort.timeout_s
        self._todo: queue.SimpleQueue[PlannedFile | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[PlannedFile, FileRecord | BaseException]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._large = threading.Semaphore(effort.streams)

    def run(self, files: Sequence[PlannedFile]) -> dict[str, FileRecord]:
        num_threads = max(1, min(self._effort.streams * _SMALL_PER_STREAM, len(files)))
        for file in files:
            self._todo.put(file)
        names = [f"ray_jax_ckpt-write-{number}" for number in range(num_threads)]
        threads = [threading.Thread(target=self._work, daemon=True, name=name) for name in names]
        for thread in threads:
            self._todo.put(None)
            thread.start()
        records: dict[str, FileRecord] = {}
        try:
            while len(records) < len(files):
                file, outcome = self._next(len(files) - len(records))
                if isinstance(outcome, BaseException):
                    raise outcome
                records[file.path] = outcome
        except BaseException:
            self._stop.set()
            # What they leave and remove is not to meet what the caller writes there next, or the caller's removal.
            join_all(threads, _GRACE_S)
            raise
        return records

    def _next(self, num_left: int) -> tuple[PlannedFile, FileRecord | BaseException]:
        try:
            return self._done.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise PersistError(
                f"Writing {self._target.path} took longer than {self._effort.timeout_s} s; {num_left} files are "
                "missing. Raise timeout_s, or see what slows the storage."
            ) from None

    def _work(self) -> None:
        while (file := self._todo.get()) is not None and not self._stop.is_set():
            try:
                with self._large if file.size >= _CHUNK_BYTES else contextlib.nullcontext():
                    self._done.put((file, self._write(file)))
            except BaseException as error:
                # In this order: what made the others stop is what is reported.
                self._done.put((file, error))
                self._stop.set()

    def _write(self, file: PlannedFile) -> FileRecord:
        path = f"{self._target.base}/{file.path}"
        for attempt in range(self._effort.retries + 1):
            try:
                return self._try(file, path)
            except IntegrityError:
                raise
            except Exception as error:
                delay = _delay_s(attempt)
                late = time.monotonic() + delay > self._deadline
                if attempt == self._effort.retries or late or self._stop.is_set() or is_permanent(error):
                    raise PersistError(
                        f"{path} ({file.size} bytes) could not be written, tried {attempt + 1} times: {error}"
                    ) from error
                logger.warning("Writing %s failed, trying again in %.1f s: %s", path, delay, error)
                self._stop.wait(delay)
        raise AssertionError("unreachable")

    def _try(self, file: PlannedFile, path: str) -> FileRecord:
        digests = _Digests(file.size)
        stream = self._target.open(file.path)
        try:
            for chunk in self._chunks(file):
                self._effort.limiter.take(len(chunk))
                digests.update(chunk)
                stream.write(chunk)
        except BaseException:
            _abandon(self._target.filesystem, stream, path)
            raise
        # Object stores say only here whether they have it.
        stream.close()
        record = digests.record()
        if record.size != file.size or (file.digest and record.digest != file.digest):
            raise IntegrityError(
                f"{path}: the bytes in memory are not those that were captured: {record.size} bytes {record.digest} "
                f"instead of {file.size} bytes {file.digest}."
            )
        return record

    def _chunks(self, file: PlannedFile) -> Iterator[memoryview]:
        for content in _contents(file, self._read):
            for start in range(0, len(content), _CHUNK_BYTES):
                if self._stop.is_set():
                    raise PersistError("stopped, since another file failed")
                yield content[start : start + _CHUNK_BYTES]


def _contents(file: PlannedFile, read: Read) -> Iterator[memoryview]:
    if file.content is not None:
        yield memoryview(file.content)
    for piece in file.pieces:
        yield piece.cut(read(piece.part, piece.offset, piece.num_bytes)).data


class _Digests:
    """Of a file that is written from its beginning to its end."""

    def __init__(self, size: int) -> None:
        self._whole = Digester()
        self._block = Digester() if size > BLOCK_BYTES else None
        self._blocks: list[str] = []
        self._size = 0

    def update(self, chunk: memoryview) -> None:
        self._whole.update(chunk)
        at = 0
        while self._block is not None and at < len(chunk):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            part = chunk[at : at + room]
            self._block.update(part)
            at, self._size = at + len(part), self._size + len(part)
            if self._size % BLOCK_BYTES == 0:
                self._close()
        if self._block is None:
            self._size += len(chunk)

    def _close(self) -> None:
        assert self._block is not None
        self._blocks.append(self._block.result())
        self._block = Digester()

    def record(self) -> FileRecord:
        if self._block is None:
            return FileRecord(size=self._size, digest=self._whole.result())
        if self._size % BLOCK_BYTES:
            self._close()
        return FileRecord(size=self._size, digest=self._whole.result(), blocks=tuple(self._blocks))


def _delay_s(attempt: int) -> float:
    """Exponential backoff with jitter, so that writers that were refused together do not come back together."""
    return random.uniform(0.5, 1.0) * min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt)


def _abandon(filesystem: Any, stream: Any, path: str) -> None:
    """Closes a stream that failed and removes what it leaves: closing completes it, even on object stores."""
    try:
        stream.close()
    except Exception as error:
        logger.debug("closing %s after a failure: %s", path, error)
    try:
        remove_file(filesystem, path)
    except Exception as error:
        logger.debug("removing %s after a failure: %s", path, error)
