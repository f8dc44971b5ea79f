"""Host memory for snapshots: anonymous, touched once, reused, and shared with processes of the same node.

Segments are memfds. They have no name, so nothing stays behind in /dev/shm after a SIGKILL, and the small /dev/shm of
containers does not matter: a segment's pages go when the last process that maps it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from ray_jax_ckpt.errors import MemoryLimitError, StoreError
from ray_jax_ckpt.system import available_bytes, process_start_time
from ray_jax_ckpt.system import process_alive as process_alive

_PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
# Python holds the GIL in madvise: pieces of this size let other threads of a store answer in between.
_POPULATE_BYTES = 8 << 20
_MAX_WASTE = 1.25
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EMFILE, errno.ENFILE)
Pace = Callable[[float], None]
"""Called between pieces of memory that are touched, with the seconds that the last one took. It may wait."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class SegmentHandle:
    """How a process of the same node finds a segment. Plain data, safe to send.

    Attributes:
        id: The segment's id, unique within its owner.
        pid: The owner.
        fd: The owner's descriptor.
        nbytes: Capacity.
        start_time: The owner's `process_start_time`.
        inode: The memfd's inode number, since a descriptor's number is reused.
    """

    id: str
    pid: int
    fd: int
    nbytes: int
    start_time: int
    inode: int


class Mapping:
    """A segment's memory in this process. A context manager; `close` unmaps. Not thread-safe.

    The mapping stays valid after the owner's death, and keeps the memory alive. Keep it for reuse: mapping afresh costs
    page table work.
    """

    def __init__(self, memory: mmap.mmap, handle: SegmentHandle) -> None:
        self.handle = handle
        self._memory = memory
        self._view: np.ndarray | None = np.frombuffer(memory, np.uint8)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._view is None

    def view(self) -> np.ndarray:
        """The whole segment as uint8, writable if it was opened so.

        Raises:
            StoreError: The mapping is closed.
        """
        if self._view is None:
            raise StoreError(f"the mapping of segment {self.handle.id} is closed")
        return self._view

    def close(self) -> None:
        """Unmaps. If arrays over the memory are still in use, it is unmapped with the last of them. Idempotent."""
        self._view = None
        _close_map(self._memory)

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Segment:
    """A piece of anonymous shared memory, owned by the arena that made it.

    Attributes:
        id: Unique within this process.
        nbytes: Capacity: what was asked for, or more.
        tag: Of the allocation that it served last.
    """

    _ids = itertools.count()

    def __init__(self, nbytes: int, pace: Pace | None = None) -> None:
        self.nbytes = nbytes
        self.tag = ""
        self.id = f"{os.getpid()}-{next(Segment._ids)}"
        self._fd = _sealed_memfd(nbytes)
        try:
            self._memory = mmap.mmap(self._fd, nbytes)
            self._view: np.ndarray | None = np.frombuffer(self._memory, np.uint8)
            _populate(self._memory, self._view, writable=True, pace=pace)
            self._handle = SegmentHandle(
                id=self.id,
                pid=os.getpid(),
                fd=self._fd,
                nbytes=nbytes,
                start_time=process_start_time(os.getpid()) or 0,
                inode=os.fstat(self._fd).st_ino,
            )
        except BaseException:
            os.close(self._fd)
            raise

    def view(self) -> np.ndarray:
        """The whole segment as writable uint8.

        Raises:
            StoreError: The arena has dropped the segment.
        """
        if self._view is None:
            raise StoreError(f"segment {self.id} has been dropped")
        return self._view

    def handle(self) -> SegmentHandle:
        """What another process of this node needs to open the segment."""
        return self._handle

    def _drop(self) -> None:
        """Gives the memory up. Who still maps it, here or elsewhere, keeps it."""
        if self._view is not None:
            self._view = None
            _close_map(self._memory)
            os.close(self._fd)


class Arena:
    """The segments of one process: bounded, and reused, since touching fresh pages is ten times slower than copying.

    Thread-safe. Whether a segment may be freed is the caller's to know: a freed one is handed out again, whoever still
    maps it.

    Args:
        max_bytes: Limit for all segments together, free ones included. None: what the node has.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used: dict[str, Segment] = {}
        self._free: dict[str, Segment] = {}
        self._reserved_bytes = 0
        self._closed = False

    @property
    def nbytes_used(self) -> int:
        """Capacity of the segments that are allocated, in bytes."""
        with self._lock:
            return sum(segment.nbytes for segment in self._used.values())

    @property
    def nbytes_held(self) -> int:
        """Capacity of all segments, free ones and those being made included, in bytes."""
        with self._lock:
            return self._held()

    def allocate(self, nbytes: int, tag: str = "") -> Segment:
        """A segment of at least `nbytes` with all pages touched. Its contents are arbitrary.

        Takes a free segment of at most a quarter more than asked: one that served the same tag before if there is one,
        since its user may still have it mapped, and of those the tightest. Otherwise makes one, at about 1 s per GB,
        after dropping free ones of other sizes if the limit asks for it.

        Raises:
            MemoryLimitError: The limit, or the node's free memory, does not allow it.
            StoreError: The arena is closed.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        capacity = capacity_of(nbytes)
        with self._lock:
            segment = self._reuse(capacity, tag)
            if segment is not None:
                segment.tag = tag
                return segment
            dropped = self._make_room(capacity)
            self._reserved_bytes += capacity
        for old in dropped:
            old._drop()
        segment = self._create(capacity)
        segment.tag = tag
        return segment

    def prepare(self, nbytes: int, tag: str, *, limit: int, pace: Pace) -> None:
        """Makes a free segment for a later `allocate` with this tag, unless there is one that fits.

        Nothing is made that would lift what is held above `limit`, or the arena's own.

        Raises:
            MemoryLimitError: The node's free memory does not allow it.
            StoreError: The arena is closed.
        """
        capacity = capacity_of(nbytes)
        with self._lock:
            self._check_open()
            allowed = limit if self.max_bytes is None else min(limit, self.max_bytes)
            if any(_fits(s, capacity) for s in self._free.values()) or self._held() + capacity > allowed:
                return
            self._reserved_bytes += capacity
        segment = self._create(capacity, pace)
        segment.tag = tag
        self.free(segment)

    def free(self, segment: Segment) -> None:
        """Takes a segment back for reuse. Freeing one twice, or another arena's, is an error.

        Raises:
            ValueError: The segment is not allocated from this arena.
        """
        with self._lock:
            if self._used.get(segment.id) is not segment:
                raise ValueError(f"segment {segment.id} is not allocated from this arena")
            del self._used[segment.id]
            self._free[segment.id] = segment

    def fits(self, nbytes: int) -> bool:
        """Whether `allocate` finds a free segment."""
        with self._lock:
            return any(_fits(segment, capacity_of(nbytes)) for segment in self._free.values())

    def trim(self, useful: Iterable[int] = ()) -> int:
        """Drops free segments and returns their size in bytes. Those that an allocation of a useful size takes stay."""
        sizes = [capacity_of(nbytes) for nbytes in useful]
        with self._lock:
            dropped = [s for s in self._free.values() if not any(_fits(s, size) for size in sizes)]
            for segment in dropped:
                del self._free[segment.id]
        for segment in dropped:
            segment._drop()
        return sum(segment.nbytes for segment in dropped)

    def close(self) -> None:
        """Drops all segments, allocated ones too. Idempotent. Later allocations raise StoreError."""
        with self._lock:
            self._closed = True
            dropped = [*self._free.values(), *self._used.values()]
            self._free.clear()
            self._used.clear()
        for segment in dropped:
            segment._drop()

    def _held(self) -> int:
        segments = itertools.chain(self._used.values(), self._free.values())
        return self._reserved_bytes + sum(segment.nbytes for segment in segments)

    def _reuse(self, capacity: int, tag: str) -> Segment | None:
        self._check_open()
        fitting = [s for s in self._free.values() if _fits(s, capacity)]
        if not fitting:
            return None
        segment = min(fitting, key=lambda s: (s.tag != tag, s.nbytes))
        del self._free[segment.id]
        self._used[segment.id] = segment
        return segment

    def _make_room(self, capacity: int) -> list[Segment]:
        """Takes free segments, largest first, off the books until `capacity` more bytes are within the limit."""
        if self.max_bytes is None:
            return []
        excess = self._held() + capacity - self.max_bytes
        free_bytes = sum(segment.nbytes for segment in self._free.values())
        if excess > free_bytes:
            raise MemoryLimitError(
                f"needs {capacity} bytes for a snapshot, but {self._held() - free_bytes} of the limit of "
                f"{self.max_bytes} bytes are in use: raise SnapshotConfig.max_bytes, or lower SnapshotConfig.copies"
            )
        dropped: list[Segment] = []
        for segment in sorted(self._free.values(), key=lambda s: s.nbytes, reverse=True):
            if excess <= 0:
                break
            dropped.append(self._free.pop(segment.id))
            excess -= segment.nbytes
        return dropped

    def _create(self, capacity: int, pace: Pace | None = None) -> Segment:
        try:
            self._check_node(capacity)
            segment = Segment(capacity, pace)
        except BaseException as error:
            with self._lock:
                self._reserved_bytes -= capacity
            if isinstance(error, OSError) and error.errno in _NO_MEMORY:
                raise MemoryLimitError(
                    f"the node cannot give {capacity} bytes for a snapshot: {error}. {_remedy(error)}"
                ) from error
            raise
        with self._lock:
            self._reserved_bytes -= capacity
            if not self._closed:
                self._used[segment.id] = segment
                return segment
        segment._drop()
        raise StoreError("the arena was closed")

    def _check_node(self, capacity: int) -> None:
        # Touching more than there is does not fail: the kernel kills a process, often the training.
        available = available_bytes()
        if available is not None and capacity > available:
            self.trim()
            available = available_bytes() or 0
            if capacity > available:
                raise MemoryLimitError(
                    f"needs {capacity} bytes for a snapshot, but the node has {available} bytes left, and "
                    f"{self.nbytes_used} are in use here: lower SnapshotConfig.copies, or use nodes with more memory"
                )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the arena is closed")


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (ulimit -n) of the node"
    return "Lower SnapshotConfig.copies, or use nodes with more memory"


def capacity_of(nbytes: int) -> int:
    """Size of a new segment for so many bytes: whole pages."""
    return max(1, -(-nbytes // _PAGE_BYTES)) * _PAGE_BYTES


def _fits(segment: Segment, capacity: int) -> bool:
    return capacity <= segment.nbytes <= capacity * _MAX_WASTE


def open_segment(handle: SegmentHandle, writable: bool = False) -> Mapping:
    """Maps another process's segment, with its page table filled. The caller closes it, or keeps it for reuse.

    Raises:
        StoreError: The owner is gone, has dropped the segment, or is another process with the same PID.
    """
    what = f"segment {handle.id} of process {handle.pid}"
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open {what}: its owner is gone or has dropped it ({error.strerror})") from error
    try:
        _check_segment(fd, handle, what)
        memory = mmap.mmap(fd, handle.nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(fd)
    mapping = Mapping(memory, handle)
    _populate(memory, mapping.view(), writable=writable)
    return mapping


def _sealed_memfd(nbytes: int) -> int:
    fd = os.memfd_create("ray_jax_ckpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A neighbour that shrank the file would kill everyone who maps it, with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _populate(memory: mmap.mmap, view: np.ndarray, *, writable: bool, pace: Pace | None = None) -> None:
    """Makes every page present, so that copies run at memory speed from the first on."""
    with contextlib.suppress(OSError, AttributeError):  # a hint that many kernels are built without
        memory.madvise(mmap.MADV_HUGEPAGE)
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    try:
        for start in range(0, len(memory), _POPULATE_BYTES):
            begun = time.monotonic()
            memory.madvise(advice, start, min(_POPULATE_BYTES, len(memory) - start))
            if pace is not None:
                pace(time.monotonic() - begun)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _touch(view, writable=writable)


def _touch(view: np.ndarray, *, writable: bool) -> None:
    """What `_populate` does where the kernel is older than 5.14. The GIL is released."""
    pages = view[::_PAGE_BYTES]
    if writable:
        np.bitwise_or(pages, 0, out=pages)
    else:
        np.max(pages)


def _close_map(memory: mmap.mmap) -> None:
    # Arrays over it are still alive: the last one to go unmaps it, so that none ever points to nothing.
    with contextlib.suppress(BufferError):
        memory.close()


def _check_segment(fd: int, handle: SegmentHandle, what: str) -> None:
    # After opening, since the PID may have been reused before.
    if process_start_time(handle.pid) != handle.start_time:
        raise StoreError(f"cannot open {what}: its owner is gone, and another process has its PID")
    status = os.fstat(fd)
    if status.st_ino != handle.inode or status.st_size != handle.nbytes:
        raise StoreError(f"cannot open {what}: its owner has dropped it, and descriptor {handle.fd} is another file")
