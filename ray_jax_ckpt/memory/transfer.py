"""How the bytes of snapshots travel between stores: Arrow Flight, in chunks, straight from and into their segments.

A fetch is a DoGet whose ticket lists ranges of parts; their bytes come as one stream. A push is a DoExchange: header,
"go on", bytes, "verified"; others may join it and bring bands of the bytes. Both sides prove that they know the run's
secret before any byte of a snapshot moves. This module is the calling side; `flight_server` serves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.digest import as_bytes
from ray_jax_ckpt.errors import (
    CheckpointError,
    RestoreTimeoutError,
    SnapshotTimeoutError,
    StoreError,
)
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.call import Call
from ray_jax_ckpt.memory.flight_server import FlightServer, Provider
from ray_jax_ckpt.memory.outgoing import Chunks, Outgoing, bands_of
from ray_jax_ckpt.memory.stream import Guard, scatter
from ray_jax_ckpt.memory.tls import Tls
from ray_jax_ckpt.memory.wire import PartSpan, PushHeader

__all__ = [
    "FlightClients",
    "FlightServer",
    "PartSpan",
    "Provider",
    "PushHeader",
    "PushResult",
    "Range",
    "fetch",
    "push",
    "streams_for",
]

_CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    # A proxy from the environment would be asked to reach the neighbour node.
    ("grpc.enable_http_proxy", 0),
    # Channels share connections, and the back-off after a failure, unless told not to.
    ("grpc.use_local_subchannel_pool", 1),
]

# A connection of its own is worth its threads from about a tenth of a second of work on.
_STREAM_BYTES = 64 << 20

Range = tuple[str, str, int, int, np.ndarray]
"""(generation, part, offset, nbytes, out): bytes of a part, and the contiguous writable array that gets them."""


@dataclass(frozen=True)
class PushResult:
    """A push that the receiver has taken over.

    Attributes:
        nbytes: Bytes sent.
        verified: Whether the receiver checked digests.
        elapsed_s: From the call to the receiver's word.
    """

    nbytes: int
    verified: bool
    elapsed_s: float


class FlightClients:
    """Calls to a run's stores, over connections that are kept. Thread-safe; calls run at the same time.

    Args:
        secret: The run's secret.
        tls: Certificates. With them only stores that have some too are called, without them only those that have none.
    """

    def __init__(self, secret: str, tls: Tls | None = None) -> None:
        self._secret, self._tls = secret, tls
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str, int], fl.FlightClient] = {}

    def push(
        self, address: str, header: PushHeader, chunks: Chunks, *, timeout_s: float, streams: int = 1
    ) -> PushResult:
        """Sends a generation's parts to the store at `address`. Blocks until the receiver has verified them.

        Args:
            address: A `FlightServer.address`.
            header: What is sent.
            chunks: `header.total_bytes` bytes in contiguous pieces of any size, asked for in another thread. They are
                sent without a copy and must not change meanwhile.
            timeout_s: Bound for the whole call, the receiver's wait for a free buffer included.
            streams: Number of connections to spread the bytes over, at most. They are cut between digested pieces.

        Raises:
            SnapshotTimeoutError: It took longer.
            AuthenticationError: One side lacks the other's secret.
            IntegrityError: What arrived has other digests.
            StoreError: The store refused, failed or is gone. Other errors of this package that its provider raised
                come as they are.
        """
        call = Call(address, self._secret, timeout_s, SnapshotTimeoutError, _describe_push(header))
        with self._reporting(call):
            # Bytes that a stopped receiver does not take block a connection, so fetches have others.
            connect = partial(self._connection, address, "push")
            outgoing = Outgoing(call, connect, header, chunks, bands_of(header, streams))
            (sent,) = call.run([lambda _: outgoing.send()])
        return PushResult(nbytes=sent, verified=bool(header.digests), elapsed_s=call.elapsed_s)

    def fetch(
        self, address: str, ranges: Sequence[Range], *, timeout_s: float, verify: bool = True, streams: int = 1
    ) -> None:
        """Copies ranges of parts from the store at `address`. Blocks until all are there, or `timeout_s`.

        Args:
            address: A `FlightServer.address`.
            ranges: What, and where to. After an error the contents of the targets are arbitrary.
            timeout_s: Bound for the whole call.
            verify: Whether the store digests what it sends, chunk by chunk, and this end compares.
            streams: Number of connections to spread the ranges over, by bytes.

        Raises:
            RestoreTimeoutError: It took longer.
            SnapshotLostError: The store has no such range.
            AuthenticationError: One side lacks the other's secret.
            IntegrityError: What arrived is not what was sent.
            StoreError: The store refused, failed or is gone.
            ValueError: A target has another size than its range.
        """
        for generation, part, _, nbytes, out in ranges:
            if out.nbytes != nbytes:
                raise ValueError(f"{nbytes} bytes of part {part} of {generation} do not fit an array of {out.nbytes}")
        call = Call(address, self._secret, timeout_s, RestoreTimeoutError, _describe_fetch(ranges))
        shares = [share for share in split(ranges, streams) if share]
        with self._reporting(call):
            connections = [self._connection(address, "fetch", number) for number in range(len(shares))]
            works = [
                partial(_fetch_stream, call, c, share, verify) for c, share in zip(connections, shares, strict=True)
            ]
            call.run(works)

    def evict(self, address: str) -> None:
        """Forgets the connections to `address`. Calls in progress go on."""
        with self._lock:
            for key in [key for key in self._clients if key[0] == address]:
                del self._clients[key]

    def close(self) -> None:
        """Forgets all connections; each ends with its last call. The object can still be used."""
        with self._lock:
            self._clients.clear()

    def _connection(self, address: str, use: str, stream: int) -> fl.FlightClient:
        with self._lock:
            client = self._clients.get((address, use, stream))
            if client is None:
                client = fl.FlightClient(address, generic_options=_CLIENT_OPTIONS, **self._options(address))
                self._clients[address, use, stream] = client
            return client

    def _options(self, address: str) -> dict[str, Any]:
        encrypted = wire.is_encrypted(address)
        if encrypted != (self._tls is not None):
            ours, theirs = ("without TLS", "with") if encrypted else ("with TLS", "without")
            raise StoreError(f"this process is {ours}, the store {theirs}: SnapshotConfig.tls must be the same for all")
        return self._tls.client_options() if self._tls is not None else {}

    @contextlib.contextmanager
    def _reporting(self, call: Call) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, pa.ArrowException, OSError, StopIteration) as error:
            # A connection that failed waits ever longer before it tries again. A new store must not wait for that.
            self.evict(call.address)
            raise call.translate(error) from error


def push(
    address: str,
    secret: str,
    header: PushHeader,
    chunks: Chunks,
    timeout_s: float,
    *,
    streams: int = 1,
    tls: Tls | None = None,
) -> PushResult:
    """`FlightClients.push` over connections of its own."""
    return FlightClients(secret, tls).push(address, header, chunks, timeout_s=timeout_s, streams=streams)


def fetch(
    address: str,
    secret: str,
    ranges: Sequence[Range],
    timeout_s: float,
    *,
    verify: bool = True,
    streams: int = 1,
    tls: Tls | None = None,
) -> None:
    """`FlightClients.fetch` over connections of its own."""
    FlightClients(secret, tls).fetch(address, ranges, timeout_s=timeout_s, verify=verify, streams=streams)


def _fetch_stream(call: Call, client: fl.FlightClient, ranges: Sequence[Range], verify: bool, guard: Guard) -> None:
    asked = tuple((generation, part, offset, nbytes) for generation, part, offset, nbytes, _ in ranges)
    ticket = wire.FetchTicket(nonce=call.nonce, ranges=asked, verify=verify)
    reader = client.do_get(fl.Ticket(ticket.to_json()), call.options())
    try:
        call.check_proof(reader.read_chunk().app_metadata)
        scatter(reader, [as_bytes(out) for *_, out in ranges], verify, guard)
    except BaseException:
        reader.cancel()
        raise


def streams_for(nbytes: int, most: int) -> int:
    """Connections that a transfer of `nbytes` is worth, at most `most` (`SnapshotConfig.streams`)."""
    return max(1, min(most, nbytes // _STREAM_BYTES))


def split(ranges: Sequence[Range], streams: int) -> list[list[Range]]:
    """Spreads ranges over at most `streams` lists of about equal bytes, and cuts those that lie across."""
    share = max(1, -(-sum(nbytes for *_, nbytes, _ in ranges) // max(1, streams)))
    shares: list[list[Range]] = [[]]
    room = share
    for generation, part, offset, nbytes, out in ranges:
        data, done = as_bytes(out), 0
        while done < nbytes:
            if room == 0:
                shares.append([])
                room = share
            count = min(room, nbytes - done)
            shares[-1].append((generation, part, offset + done, count, data[done : done + count]))
            done, room = done + count, room - count
    return shares


def _describe_push(header: PushHeader) -> str:
    return f"pushing {header.total_bytes} bytes from {header.source}, generation {header.generation}"


def _describe_fetch(ranges: Sequence[Range]) -> str:
    first = f", first {ranges[0][1]} of generation {ranges[0][0]}" if ranges else ""
    return f"fetching {sum(nbytes for *_, nbytes, _ in ranges)} bytes in {len(ranges)} ranges{first}"
