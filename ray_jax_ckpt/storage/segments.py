"""Verified bytes of files on storage: only what is needed is read, and all that is read is compared with its digest."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow.fs as pafs

from ray_jax_ckpt.digest import Digester
from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.model.shards import Box, extent, intersect, volume, within
from ray_jax_ckpt.storage.filesystem import describe, reading
from ray_jax_ckpt.storage.manifest import BLOCK_BYTES, MAX_MANIFEST_BYTES, FileRecord
from ray_jax_ckpt.storage.streams import Deadline, ask, retried

PIECE_BYTES = 4 << 20
"""What is read at a time where bytes do not go straight to where they belong."""
_LARGE_BYTES = 1 << 20

_Run = tuple[int, int, str]
"""First byte, byte behind the last, and digest of a block of a segment."""


@dataclass(frozen=True)
class Segment:
    """A range of a file, and its digests.

    Attributes:
        path: Of the file, on its filesystem.
        offset: First byte.
        size: In bytes.
        blocks: Digests of its blocks of `block_bytes`, one behind the other.
        block_bytes: Size of each but the last.
    """

    path: str
    offset: int
    size: int
    blocks: tuple[str, ...]
    block_bytes: int

    @classmethod
    def of_file(cls, path: str, record: FileRecord) -> Segment:
        """All of a file."""
        if record.blocks is None:
            return cls(path, 0, record.size, (record.digest,), max(record.size, 1))
        return cls(path, 0, record.size, record.blocks, BLOCK_BYTES)

    @classmethod
    def of_range(cls, path: str, offset: int, size: int, digest: str) -> Segment:
        """A range that has a digest of its own."""
        return cls(path, offset, size, (digest,), max(size, 1))

    def runs(self, start: int, stop: int) -> Iterator[_Run]:
        """First byte, byte behind the last, and digest of each block that has some of the bytes `start` to `stop`."""
        for number in range(start // self.block_bytes, -(-stop // self.block_bytes)):
            first = number * self.block_bytes
            yield first, min(first + self.block_bytes, self.size), self.blocks[number]


@dataclass(frozen=True)
class Share:
    """What a wanted box takes of a stored one.

    Attributes:
        target: The wanted box as an array, which gets it.
        target_box: Where that is in the global array.
        stored_box: What the segment holds.
        shared: What of both.
    """

    target: np.ndarray
    target_box: Box
    stored_box: Box
    shared: Box

    @property
    def view(self) -> np.ndarray:
        """Of the target, what it takes."""
        # With the ellipsis it is a view also where there are no dimensions.
        return self.target[(..., *within(self.shared, self.target_box))]

    @property
    def is_whole(self) -> bool:
        """Whether it takes all of the segment, in one piece."""
        return self.shared == self.stored_box and self.view.flags.c_contiguous

    def place(self, first: int, piece: np.ndarray) -> None:
        """Puts those of some elements that belong to it where they belong.

        Args:
            first: Number of the piece's first element in the row-major stored box.
            piece: One-dimensional.
        """
        at = 0
        for box in flat_boxes(first, first + piece.size, self.stored_box):
            size = volume(box)
            both = intersect(box, self.shared)
            if both is not None:
                values = piece[at : at + size].reshape(extent(box))
                self.target[within(both, self.target_box)] = values[within(both, box)]
            at += size


def flat_boxes(start: int, stop: int, box: Box) -> Iterator[Box]:
    """The boxes that the elements `start` to `stop` of a row-major box are, in order."""
    if start >= stop:
        return
    if not box:
        yield ()
        return
    (low, _), rest = box[0], box[1:]
    row = volume(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        yield from _row(low + first, flat_boxes(head, min(row, stop - first * row), rest))
        first += 1
    if last > first:
        yield ((low + first, low + last), *rest)
    if tail and last >= first:
        yield from _row(low + last, flat_boxes(0, tail, rest))


def _row(at: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (((at, at + 1), *box) for box in boxes)


def needed(shares: Sequence[Share], itemsize: int) -> tuple[int, int]:
    """First byte, and byte behind the last, of a stored box that some shares need."""
    starts, stops = [], []
    for share in shares:
        strides = list(itertools.accumulate(reversed(extent(share.stored_box)[1:]), int.__mul__, initial=1))[::-1]
        sides = list(zip(share.shared, share.stored_box, strict=True))
        starts.append(sum((a - c) * s for ((a, _), (c, _)), s in zip(sides, strides, strict=False)))
        stops.append(1 + sum((b - 1 - c) * s for ((_, b), (c, _)), s in zip(sides, strides, strict=False)))
    return min(starts) * itemsize, max(stops) * itemsize


def read(filesystem: pafs.FileSystem, segment: Segment, shares: Sequence[Share], deadline: Deadline) -> None:
    """Reads a stored box for all who want some of it.

    What a target got is to be thrown away if this raises: bytes are placed before the digest is known.

    Raises:
        IntegrityError: The bytes are not those that were written, or there are too few of them.
        NoCheckpointError: The file is not there.
        StorageError: It could not be read, several times.
        RestoreTimeoutError: It was not done in time.
    """
    what = f"Reading {describe(filesystem, segment.path)}"
    itemsize = shares[0].target.dtype.itemsize
    whole = shares[0].view.reshape(-1).view(np.uint8) if len(shares) == 1 and shares[0].is_whole else None
    # Pieces have to hold whole elements; strings have sizes that do not divide a block.
    step = PIECE_BYTES if PIECE_BYTES % itemsize == 0 and segment.block_bytes % itemsize == 0 else segment.block_bytes
    if whole is None and segment.block_bytes % itemsize and len(segment.blocks) > 1:
        _read_all(filesystem, segment, shares, deadline)
        return
    for start, stop, digest in segment.runs(*needed(shares, itemsize)):
        run = (start, stop, digest)
        if whole is not None:
            buffers = [whole[start:stop]]
            retried(partial(_pieces, filesystem, segment, run, buffers, deadline), deadline, what)
        else:
            retried(partial(_spread, filesystem, segment, run, step, shares, deadline), deadline, what)


def read_small(filesystem: pafs.FileSystem, path: str, deadline: Deadline | None = None) -> bytes:
    """All of a file whose digest is not known; no more than `MAX_MANIFEST_BYTES`.

    Raises:
        IntegrityError: It is larger.
        NoCheckpointError, StorageError, RestoreTimeoutError: It cannot be read.
    """
    where = describe(filesystem, path)

    def take() -> bytes:
        with filesystem.open_input_stream(path) as file:
            return file.read(MAX_MANIFEST_BYTES + 1)

    content = ask(take, f"Reading {where}", deadline)
    if len(content) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{where} has more than the {MAX_MANIFEST_BYTES} bytes that are read at most.")
    return content


def read_bytes(filesystem: pafs.FileSystem, segment: Segment, deadline: Deadline) -> bytearray:
    """All of a segment. Raises as `read` does."""
    content = bytearray(segment.size)
    array, box = np.frombuffer(content, np.uint8), ((0, segment.size),)
    if segment.size:
        read(filesystem, segment, [Share(array, box, box, box)], deadline)
    else:
        check(filesystem, segment, deadline)
    return content


def read_block(filesystem: pafs.FileSystem, segment: Segment, run: _Run, deadline: Deadline) -> bytearray:
    """One of a segment's `runs`. Raises as `read` does."""
    content = bytearray(run[1] - run[0])
    what = f"Reading {describe(filesystem, segment.path)}"
    retried(lambda: _pieces(filesystem, segment, run, [np.frombuffer(content, np.uint8)], deadline), deadline, what)
    return content


def check(filesystem: pafs.FileSystem, segment: Segment, deadline: Deadline) -> None:
    """Reads a segment and keeps nothing. Raises as `read` does."""
    buffer = _buffer(min(PIECE_BYTES, segment.size))
    what = f"Reading {describe(filesystem, segment.path)}"
    for run in segment.runs(0, max(segment.size, 1)):
        sizes = [min(PIECE_BYTES, run[1] - at) for at in range(run[0], run[1], PIECE_BYTES)]

        def skim(run: _Run = run, sizes: Sequence[int] = sizes) -> None:
            _pieces(filesystem, segment, run, (buffer[:size] for size in sizes), deadline)

        retried(skim, deadline, what)


def _read_all(filesystem: pafs.FileSystem, segment: Segment, shares: Sequence[Share], deadline: Deadline) -> None:
    content = np.frombuffer(read_bytes(filesystem, segment, deadline), np.uint8).view(shares[0].target.dtype)
    for share in shares:
        share.place(0, content)


def _spread(
    filesystem: pafs.FileSystem,
    segment: Segment,
    run: _Run,
    step: int,
    shares: Sequence[Share],
    deadline: Deadline,
) -> None:
    start, stop, _ = run
    buffer, dtype = _buffer(min(step, stop - start)), shares[0].target.dtype

    def pieces() -> Iterator[np.ndarray]:
        for at in range(start, stop, step):
            piece = buffer[: min(step, stop - at)]
            yield piece
            for share in shares:
                share.place(at // dtype.itemsize, piece.view(dtype))

    _pieces(filesystem, segment, run, pieces(), deadline)


def _buffer(num_bytes: int) -> np.ndarray:
    if num_bytes < _LARGE_BYTES:
        return np.empty(num_bytes, np.uint8)
    # Not from the heap, which keeps for each thread what it gets back.
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def _pieces(
    filesystem: pafs.FileSystem,
    segment: Segment,
    run: _Run,
    buffers: Sequence[np.ndarray] | Iterator[np.ndarray],
    deadline: Deadline,
) -> None:
    """Fills buffers with a run, one behind the other, and checks its digest."""
    (start, stop, expected), where = run, describe(filesystem, segment.path)
    digester, at = Digester(), segment.offset + start
    with reading(f"Reading {where}"), filesystem.open_input_file(segment.path) as file:
        file.seek(at)
        for buffer in buffers:
            for first in range(0, buffer.nbytes, PIECE_BYTES):
                deadline.check(f"Reading {where}")
                _fill(file, buffer[first : first + PIECE_BYTES], where)
                digester.update(buffer[first : first + PIECE_BYTES])
    found = digester.result()
    if found != expected:
        raise IntegrityError(
            f"{where} is damaged: bytes {segment.offset + start} to {segment.offset + stop} have the digest {found}, "
            f"and the checkpoint was written with {expected}. Restore another one, or fetch this file again from where "
            "it was copied from."
        )


def _fill(file: Any, buffer: np.ndarray, where: str) -> None:
    done = 0
    while done < buffer.nbytes:
        count = file.readinto(buffer.data[done:])
        if not count:
            raise IntegrityError(f"{where} is damaged: it ends {buffer.nbytes - done} bytes too early.")
        done += count
