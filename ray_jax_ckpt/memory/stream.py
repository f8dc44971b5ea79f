"""Snapshot bytes as streams of Arrow record batches: cut, packed, put back in place and verified."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jax_ckpt.digest import Digester, as_bytes, copy_into_digest
from ray_jax_ckpt.errors import IntegrityError, StoreError
from ray_jax_ckpt.memory.wire import Band, PushHeader

CHUNK_BYTES = 8 << 20
# Ranges below this are packed together: a message of its own costs more than copying so few bytes.
_PACK_BELOW_BYTES = 1 << 20
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


def to_batch(data: np.ndarray | memoryview) -> pa.RecordBatch:
    """A record batch over the same memory."""
    column = pa.Array.from_buffers(pa.uint8(), data.nbytes, [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def cut(buffers: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same bytes in pieces of at most `CHUNK_BYTES`."""
    for data in buffers:
        for start in range(0, data.nbytes, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def pack(views: Iterable[memoryview]) -> Iterator[np.ndarray]:
    """The same bytes in chunks: large pieces as they are, runs of small ones copied together."""
    small: list[memoryview] = []
    nbytes = 0
    for view in views:
        large = view.nbytes >= _PACK_BELOW_BYTES
        if small and (large or nbytes + view.nbytes > CHUNK_BYTES):
            yield as_bytes(b"".join(small))
            small, nbytes = [], 0
        if large:
            yield from cut([as_bytes(view)])
        else:
            small.append(view)
            nbytes += view.nbytes
    if small:
        yield as_bytes(b"".join(small))


class Guard:
    """Stands before memory that a transfer writes to. Once `close` has returned, nothing is written any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise StoreError("the transfer was given up")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Waits for a write in progress, at most a chunk, and forbids others."""
        with self._lock:
            self._closed = True


def scatter(reader: Any, outs: list[np.ndarray], verify: bool, guard: Guard) -> None:
    """Spreads a stream's bytes over `outs`, in order, as long as `guard` is open."""
    targets = iter([out for out in outs if out.nbytes])
    target = next(targets, None)
    for data, expected in read_arrays(reader):
        digester = Digester() if verify else None
        while data.nbytes:
            if target is None:
                raise StoreError("more bytes came than were asked for")
            count = min(target.nbytes, data.nbytes)
            with guard:
                _copy(target[:count], data[:count], digester)
            data, target = data[count:], target[count:]
            target = target if target.nbytes else next(targets, None)
        if digester is not None and digester.result() != expected:
            raise IntegrityError("a chunk arrived with another digest than it was sent with")
    if target is not None:
        raise StoreError("the stream ended early")


def read_arrays(reader: Any) -> Iterator[tuple[np.ndarray, str]]:
    """A stream's chunks as uint8 arrays without a copy, with what the sender said about each."""
    if reader.schema != SCHEMA:
        raise StoreError("the stream does not consist of bytes")
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is None:
            continue
        chunk.data.validate()  # a peer's lengths may exceed its buffers
        said = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        yield _values(chunk.data.column(0)), said.decode(errors="replace")


def _values(column: Any) -> np.ndarray:
    """A validated column's bytes. `Array.to_numpy` would import pandas: seconds, while a worker waits for its state."""
    if column.null_count or not len(column):
        return np.empty(0, np.uint8)
    return np.frombuffer(column.buffers()[1], np.uint8, len(column), column.offset)


def _copy(target: np.ndarray, data: np.ndarray, digester: Digester | None) -> None:
    if digester is None:
        np.copyto(target, data)
    else:
        copy_into_digest(target, data, digester)


class _Verifier:
    """Copies a band's bytes into place as they come, and digests the header's pieces on the way."""

    def __init__(self, target: np.ndarray, header: PushHeader, band: Band, guard: Guard) -> None:
        start, stop = band[0], band[0] + band[1]
        self._target, self._guard = target, guard
        self._pieces = iter(sorted(piece for piece in header.digests if _lies_in(piece, start, stop)))
        self._piece = next(self._pieces, None)
        self._digester = Digester()
        self.position = start

    def take(self, data: np.ndarray) -> None:
        """Takes the next bytes. Raises IntegrityError at the first piece that differs."""
        while data.nbytes:
            wanted, covered = self._until_boundary()
            count = data.nbytes if wanted is None else min(wanted, data.nbytes)
            out = self._target[self.position : self.position + count]
            with self._guard:
                _copy(out, data[:count], self._digester if covered else None)
            self.position += count
            data = data[count:]
            self.finish_pieces()

    def finish_pieces(self) -> None:
        """Compares the pieces that end here, the empty ones included."""
        while self._piece is not None and self.position >= self._piece[0] + self._piece[1]:
            offset, nbytes, expected = self._piece
            if self._digester.result() != expected:
                raise IntegrityError(f"the {nbytes} bytes at offset {offset} arrived with another digest")
            self._digester = Digester()
            self._piece = next(self._pieces, None)

    def _until_boundary(self) -> tuple[int | None, bool]:
        """Bytes until a piece begins or ends (None: never again), and whether they belong to one."""
        if self._piece is None:
            return None, False
        offset, nbytes, _ = self._piece
        if self.position < offset:
            return offset - self.position, False
        return offset + nbytes - self.position, True


def fill(target: np.ndarray, header: PushHeader, reader: Any, band: Band, guard: Guard) -> None:
    """Copies a push's stream into its band of `target` and verifies it, as long as `guard` is open.

    Raises:
        IntegrityError: A piece has another digest.
        StoreError: There are too few bytes, or too many.
    """
    if target.nbytes < header.total_bytes:
        raise StoreError(f"the buffer of {target.nbytes} bytes is too small for {header.total_bytes} bytes")
    start, stop = band[0], band[0] + band[1]
    verifier = _Verifier(as_bytes(target), header, band, guard)
    verifier.finish_pieces()
    for data, _ in read_arrays(reader):
        if data.nbytes > stop - verifier.position:
            raise StoreError(f"more bytes came than the band's {band[1]}")
        verifier.take(data)
    # The stream of a sender that died ends like any other.
    if verifier.position != stop:
        raise StoreError(f"the stream ended after {verifier.position - start} of {band[1]} bytes")


def _lies_in(piece: tuple[int, int, str], start: int, stop: int) -> bool:
    offset, nbytes, _ = piece
    return start <= offset < stop or (offset == stop and nbytes == 0)
