"""The sending half of a push: over one stream, or cut into bands that travel side by side."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.digest import as_bytes
from ray_jax_ckpt.errors import StoreError
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.call import Call
from ray_jax_ckpt.memory.stream import SCHEMA, cut, to_batch
from ray_jax_ckpt.memory.wire import Band, PushHeader
from ray_jax_ckpt.observe import faults

Chunks = Iterable[memoryview | np.ndarray]


def bands_of(header: PushHeader, streams: int) -> tuple[Band, ...]:
    """Cuts a push into at most `streams` bands of about equal bytes, none of them within a digested piece."""
    share = -(-header.total_bytes // max(1, streams))
    edges = [0]
    for offset in sorted(offset for offset, *_ in header.digests) or range(share, header.total_bytes, max(1, share)):
        if offset - edges[-1] >= share > 0 and offset < header.total_bytes:
            edges.append(offset)
    return tuple((start, stop - start) for start, stop in itertools.pairwise([*edges, header.total_bytes]))


class Outgoing:
    """One push.

    Args:
        call: It belongs to.
        connect: Gives the connection of each of its streams.
        header: What is sent.
        chunks: Its bytes, in contiguous pieces of any size.
        bands: What of it each stream carries. Several need chunks that can be gone through more than once.
    """

    def __init__(
        self,
        call: Call,
        connect: Callable[[int], fl.FlightClient],
        header: PushHeader,
        chunks: Chunks,
        bands: tuple[Band, ...],
    ) -> None:
        self._call, self._connect, self._header = call, connect, header
        self._chunks, self._bands = chunks, bands

    def send(self) -> int:
        """Blocks until the receiver has verified everything. Returns the bytes sent."""
        request = wire.PushRequest(nonce=self._call.nonce, header=self._header, bands=self._bands)
        with self._exchange(0, fl.FlightDescriptor.for_command(request.to_json())) as (writer, reader):
            sent = self._send_bands(writer, reader)
            if sent != self._header.total_bytes:
                raise StoreError(f"sent {sent} bytes for a header of {self._header.total_bytes} bytes")
            writer.done_writing()
            reader.read_chunk()
        return sent

    def _send_bands(self, writer: Any, reader: Any) -> int:
        if len(self._bands) == 1:
            return self._write(writer, reader, self._chunks)
        pieces = [as_bytes(chunk) for chunk in self._chunks]
        first = partial(self._write, writer, reader, within(pieces, self._bands[0]))
        others = [partial(self._join, number, pieces) for number in range(1, len(self._bands))]
        works = [first, *others]
        return sum(self._call.run([lambda _, work=work: work() for work in works]))

    def _join(self, number: int, pieces: Sequence[np.ndarray]) -> int:
        """Sends a band over a stream of its own."""
        request = wire.JoinRequest(nonce=self._call.nonce, band=number)
        with self._exchange(number, fl.FlightDescriptor.for_path(request.to_json())) as (writer, reader):
            sent = self._write(writer, reader, within(pieces, self._bands[number]))
            writer.done_writing()
            reader.read_chunk()
        return sent

    @contextlib.contextmanager
    def _exchange(self, number: int, descriptor: fl.FlightDescriptor) -> Iterator[tuple[Any, Any]]:
        """A stream to a receiver that has proved who it is."""
        writer, reader = self._connect(number).do_exchange(descriptor, self._call.options())
        try:
            self._call.opened(reader)
            writer.begin(SCHEMA)
            self._call.check_proof(reader.read_chunk().app_metadata)
            yield writer, reader
        except BaseException:
            reader.cancel()
            raise
        finally:
            # What went wrong has been raised by now. Closing frees the call.
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()

    def _write(self, writer: Any, reader: Any, chunks: Chunks) -> int:
        sent = 0
        for piece in cut(as_bytes(chunk) for chunk in chunks):
            try:
                writer.write_batch(to_batch(faults.tamper("send", self._header.generation, piece)))
            except (pa.ArrowException, OSError):
                # Writing only says that the stream is broken; reading says why.
                reader.read_chunk()
                raise
            sent += piece.nbytes
        return sent


def within(pieces: Sequence[np.ndarray], band: Band) -> Iterator[np.ndarray]:
    """What of pieces that follow each other lies in a band."""
    start, stop, offset = band[0], band[0] + band[1], 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, piece.nbytes)
        if low < high:
            yield piece[low:high]
        offset += piece.nbytes
