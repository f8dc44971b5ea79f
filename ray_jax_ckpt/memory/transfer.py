"""How the bytes of snapshots travel between stores: Arrow Flight, in chunks, straight from and into their segments.

A fetch is a DoGet whose ticket lists ranges of parts; their bytes come as one stream. A push is a DoExchange: header, "go on",
bytes, "verified". Both sides prove that they know the run's secret before any snapshot's byte moves.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.errors import (
    AuthenticationError,
    CheckpointError,
    IntegrityError,
    RestoreTimeoutError,
    SnapshotTimeoutError,
    StoreError,
)
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.digest import Digester, as_bytes, copy_into_digest, digest
from ray_jax_ckpt.memory.wire import PushHeader

__all__ = ["FlightClients", "FlightServer", "Provider", "PushHeader", "PushResult", "fetch", "push"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
# Ranges below this are packed together: a message of its own costs more than copying so few bytes.
_PACK_BELOW_BYTES = 1 << 20
_SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
_HEADER = "authorization"
_CLOSE_S = 5.0
_LOG_EVERY_S = 60.0
_MAX_INTRUDERS = 1024
_CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    # A proxy from the environment would be asked to reach the neighbour node.
    ("grpc.enable_http_proxy", 0),
    # Channels share connections, and the back-off after a failure, unless told not to.
    ("grpc.use_local_subchannel_pool", 1),
]

Range = tuple[str, str, int, int, np.ndarray]


class Provider(Protocol):
    """What a store does for its server. Called from many threads at once. Errors of this package reach the peer as such."""

    def read(self, generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        """Exactly these bytes, without a copy. They must stay as they are until sent: digests catch it if not.

        Raises:
            SnapshotLostError: There is no such generation, part or range here.
        """
        ...

    def begin_receive(self, header: PushHeader) -> np.ndarray:
        """A writable uint8 buffer of at least `header.total_bytes`; it may wait, bounded, until one is free.

        `end_receive` follows exactly once for each buffer returned. Raising refuses the push.
        """
        ...

    def end_receive(self, header: PushHeader, ok: bool) -> None:
        """The buffer is filled and verified, or (not `ok`) holds nothing and is to be released. Raising refuses the push."""
        ...


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


class FlightServer:
    """Serves one store's memory to the run's other stores and workers, on a port of its own, from background threads.

    Args:
        secret: The run's secret. Who lacks it is refused, and logged at most once a minute per address.
        provider: Where bytes come from and go to.
        host: The IP address to listen on: the node's, as its peers reach it.
    """

    def __init__(self, secret: str, provider: Provider, host: str) -> None:
        name = f"[{host}]" if ":" in host else host
        self._server = _Server(secret, provider, name)
        self.address: str = self._server.address

    def close(self) -> None:
        """Stops serving. Waits for calls in progress, but at most 5 s: a stalled peer cannot hold a store back. Idempotent."""
        # A plain thread, since Arrow's own shutdown waits for a stalled peer for ever.
        closer = threading.Thread(target=self._server.shutdown, name="rjc-flight-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_S)


class FlightClients:
    """Connections to stores, kept for reuse. Thread-safe. `close` ends those that are idle; others end with their last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, int], fl.FlightClient] = {}

    def get(self, address: str, stream: int = 0) -> fl.FlightClient:
        """The connection number `stream` to `address`. Connecting itself happens with the first call."""
        with self._lock:
            client = self._clients.get((address, stream))
            if client is None:
                client = fl.FlightClient(address, generic_options=_CLIENT_OPTIONS)
                self._clients[address, stream] = client
            return client

    def evict(self, address: str) -> None:
        """Forgets the connections to `address`, such as after a failure: a new store there need not wait for a back-off."""
        with self._lock:
            for key in [key for key in self._clients if key[0] == address]:
                del self._clients[key]

    def close(self) -> None:
        """Forgets all connections. The object can still be used."""
        with self._lock:
            self._clients.clear()


def push(
    address: str,
    secret: str,
    header: PushHeader,
    chunks: Iterable[memoryview | np.ndarray],
    timeout_s: float,
    *,
    clients: FlightClients | None = None,
) -> PushResult:
    """Sends a generation's parts to the store at `address`. Blocks until the receiver has verified them, or `timeout_s`.

    Args:
        address: A `FlightServer.address`.
        secret: The run's secret.
        header: What is sent.
        chunks: `header.total_bytes` bytes in contiguous pieces of any size. They are sent without a copy and must not change.
        timeout_s: Bound for the whole call, the receiver's wait for a free buffer included.
        clients: Where to keep the connection.

    Raises:
        SnapshotTimeoutError: It took longer.
        AuthenticationError: One side lacks the other's secret.
        IntegrityError: What arrived has other digests.
        StoreError: The store refused, failed or is gone; or whatever other error of this package its provider raised.
    """
    call = _Call(address, secret, timeout_s, SnapshotTimeoutError, _describe_push(header))
    with call.translated(clients) as pool:
        request = wire.PushRequest(nonce=call.nonce, header=header)
        descriptor = fl.FlightDescriptor.for_command(request.to_json())
        writer, reader = pool.get(address).do_exchange(descriptor, call.options())
        try:
            writer.begin(_SCHEMA)
            call.check_proof(reader.read_chunk().app_metadata)
            sent = _send(writer, reader, chunks)
            if sent != header.total_bytes:
                raise StoreError(f"sent {sent} bytes for a header of {header.total_bytes} bytes")
            writer.done_writing()
            reader.read_chunk()
        except BaseException:
            reader.cancel()
            raise
        finally:
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()
    return PushResult(nbytes=sent, verified=bool(header.digests), elapsed_s=call.elapsed_s)


def fetch(
    address: str,
    secret: str,
    ranges: Sequence[Range],
    timeout_s: float,
    *,
    verify: bool = True,
    streams: int = 1,
    clients: FlightClients | None = None,
) -> None:
    """Copies ranges of parts from the store at `address`. Blocks until all are there, or `timeout_s`.

    Args:
        address: A `FlightServer.address`.
        secret: The run's secret.
        ranges: (generation, part, offset, nbytes, out) each, `out` a contiguous writable array of `nbytes` bytes. After an error
            the contents of the outs are arbitrary.
        timeout_s: Bound for the whole call.
        verify: Whether the store digests what it sends, chunk by chunk, and this end compares.
        streams: Number of connections to spread the ranges over, by bytes.
        clients: Where to keep connections.

    Raises:
        RestoreTimeoutError: It took longer.
        SnapshotLostError: The store has no such range.
        AuthenticationError: One side lacks the other's secret.
        IntegrityError: What arrived is not what was sent.
        StoreError: The store refused, failed or is gone.
    """
    for generation, part, _, nbytes, out in ranges:
        if out.nbytes != nbytes:
            raise ValueError(f"part {part} of {generation}: {nbytes} bytes do not fit an array of {out.nbytes} bytes")
    call = _Call(address, secret, timeout_s, RestoreTimeoutError, _describe_fetch(ranges))
    shares = [share for share in _split(ranges, streams) if share]
    with call.translated(clients) as pool:
        if len(shares) == 1:
            _fetch_stream(call, pool.get(address), shares[0], verify)
        elif shares:
            with ThreadPoolExecutor(len(shares), "rjc-fetch") as threads:
                jobs = [
                    threads.submit(_fetch_stream, call, pool.get(address, number), share, verify)
                    for number, share in enumerate(shares)
                ]
                for job in jobs:
                    job.result()


class _Call:
    """One call of a client: its deadline, its nonce, and what its errors say."""

    def __init__(
        self, address: str, secret: str, timeout_s: float, timeout_error: type[CheckpointError], what: str
    ) -> None:
        self.address = address
        self.nonce = secrets.token_hex(16)
        self._secret = secret
        self._timeout_s = timeout_s
        self._timeout_error = timeout_error
        self._what = what
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def options(self) -> fl.FlightCallOptions:
        # gRPC tells the server the deadline too, which frees its buffer when this process is stopped.
        left = max(0.001, self._timeout_s - self.elapsed_s)
        token = wire.call_token(self._secret, self.address)
        return fl.FlightCallOptions(timeout=left, headers=[(_HEADER.encode(), token.encode())])

    def check_proof(self, answer: pa.Buffer | None) -> None:
        proof = b"" if answer is None else answer.to_pybytes()
        if not wire.same(wire.server_proof(self._secret, self.address, self.nonce), proof.decode(errors="replace")):
            raise AuthenticationError("who answers there does not know the run's secret")

    @contextlib.contextmanager
    def translated(self, clients: FlightClients | None) -> Iterator[FlightClients]:
        pool = clients or FlightClients()
        try:
            yield pool
        except (CheckpointError, pa.ArrowException, OSError, StopIteration) as error:
            pool.evict(self.address)
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> CheckpointError:
        where = f"{self._what}, store {self.address}, after {self.elapsed_s:.1f} s: "
        if isinstance(error, CheckpointError):
            return type(error)(where + str(error))
        if isinstance(error, fl.FlightUnauthenticatedError):
            return AuthenticationError(where + "the store does not accept this run's secret")
        if isinstance(error, fl.FlightTimedOutError) or self.elapsed_s >= self._timeout_s:
            limit = f"no end within timeout_s={self._timeout_s:g}: raise SnapshotConfig.timeout_s if the network is slow"
            return self._timeout_error(where + limit)
        if isinstance(error, StopIteration):
            return StoreError(where + "the store ended the stream early")
        kind, text = wire.error_from_text(str(error))
        return kind(where + text)


class _Auth(fl.ServerMiddleware):
    def __init__(self, ok: bool) -> None:
        super().__init__()
        self.ok = ok


class _AuthFactory(fl.ServerMiddlewareFactory):
    """Checks every call's token. It only marks the call, since middleware does not know the peer's address for the log."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> _Auth:
        found = headers.get(_HEADER, [])
        given = found[0] if len(found) == 1 else ""
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        return _Auth(bool(self.token) and wire.same(self.token, text))


class _Intruders:
    """Remembers who was logged when. Bounded, since anybody can connect from many addresses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}

    def log(self, peer: str) -> None:
        host = peer.rpartition(":")[0]
        now = time.monotonic()
        with self._lock:
            if now - self._logged.get(host, -_LOG_EVERY_S) < _LOG_EVERY_S:
                return
            if len(self._logged) >= _MAX_INTRUDERS:
                self._logged.clear()
            self._logged[host] = now
        logger.warning("Refused a connection from %s: it does not know the run's secret.", host)


class _Server(fl.FlightServerBase):
    """The Flight side of `FlightServer`."""

    def __init__(self, secret: str, provider: Provider, host: str) -> None:
        factory = _AuthFactory("")
        super().__init__(f"grpc+tcp://{host}:0", middleware={"auth": factory})
        self.address = f"grpc+tcp://{host}:{self.port}"
        # Until here, while the port was unknown, no token was accepted.
        factory.token = wire.call_token(secret, self.address)
        self._secret = secret
        self._provider = provider
        self._intruders = _Intruders()

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.GeneratorStream:
        self._admit(context)
        with _reported():
            request = wire.FetchTicket.from_json(ticket.ticket)
        return fl.GeneratorStream(_SCHEMA, self._answer(request))

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        self._admit(context)
        with _reported():
            request = wire.PushRequest.from_json(descriptor.command or b"")
            target = self._provider.begin_receive(request.header)
            self._receive(request, target, reader, writer)
            writer.write_metadata(b"ok")

    def do_put(self, context: fl.ServerCallContext, *_: object) -> None:
        self._refuse(context)

    def do_action(self, context: fl.ServerCallContext, *_: object) -> None:
        self._refuse(context)

    def list_actions(self, context: fl.ServerCallContext) -> None:
        self._refuse(context)

    def list_flights(self, context: fl.ServerCallContext, *_: object) -> None:
        self._refuse(context)

    def get_flight_info(self, context: fl.ServerCallContext, *_: object) -> None:
        self._refuse(context)

    def get_schema(self, context: fl.ServerCallContext, *_: object) -> None:
        self._refuse(context)

    def _admit(self, context: fl.ServerCallContext) -> None:
        auth = context.get_middleware("auth")
        if not (isinstance(auth, _Auth) and auth.ok):
            peer = context.peer()
            self._intruders.log(peer.decode(errors="replace") if isinstance(peer, bytes) else str(peer))
            raise fl.FlightUnauthenticatedError("the run's secret is missing or wrong")

    def _refuse(self, context: fl.ServerCallContext) -> None:
        self._admit(context)
        raise NotImplementedError("a store serves DoGet and DoExchange only")

    def _answer(self, request: wire.FetchTicket) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        with _reported():
            proof = wire.server_proof(self._secret, self.address, request.nonce)
            yield _batch(memoryview(b"")), proof.encode()
            for chunk in _pack(self._read(request)):
                yield _batch(chunk), digest(chunk).encode() if request.verify else b""

    def _read(self, request: wire.FetchTicket) -> Iterator[memoryview]:
        for generation, part, offset, nbytes in request.ranges:
            view = self._provider.read(generation, part, offset, nbytes)
            if view.nbytes != nbytes:
                raise StoreError(f"part {part} of {generation} has no {nbytes} bytes at offset {offset}")
            yield view

    def _receive(
        self,
        request: wire.PushRequest,
        target: np.ndarray,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        header = request.header
        try:
            writer.write_metadata(wire.server_proof(self._secret, self.address, request.nonce).encode())
            _fill(target, header, reader)
        except BaseException:
            self._provider.end_receive(header, ok=False)
            raise
        self._provider.end_receive(header, ok=True)


class _Verifier:
    """Copies a push's bytes into place as they come, and digests the header's pieces on the way."""

    def __init__(self, target: np.ndarray, header: PushHeader) -> None:
        self._target = target
        self._pieces = iter(header.digests)
        self._piece = next(self._pieces, None)
        self._digester = Digester()
        self.position = 0

    def take(self, data: np.ndarray) -> None:
        """Takes the next bytes. Raises IntegrityError at the first piece that differs."""
        while data.nbytes:
            wanted, covered = self._until_boundary()
            count = data.nbytes if wanted is None else min(wanted, data.nbytes)
            out = self._target[self.position : self.position + count]
            if covered:
                copy_into_digest(out, data[:count], self._digester)
            else:
                np.copyto(out, data[:count])
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


def _fill(target: np.ndarray, header: PushHeader, reader: fl.MetadataRecordBatchReader) -> None:
    if target.nbytes < header.total_bytes:
        raise StoreError(f"the buffer of {target.nbytes} bytes is too small for {header.total_bytes} bytes")
    verifier = _Verifier(as_bytes(target), header)
    verifier.finish_pieces()
    for data, _ in _arrays(reader):
        if data.nbytes > header.total_bytes - verifier.position:
            raise StoreError(f"more bytes came than the header's {header.total_bytes}")
        verifier.take(data)
    # The stream of a sender that died ends like any other.
    if verifier.position != header.total_bytes:
        raise StoreError(f"the stream ended after {verifier.position} of {header.total_bytes} bytes")


def _fetch_stream(call: _Call, client: fl.FlightClient, ranges: Sequence[Range], verify: bool) -> None:
    asked = tuple((generation, part, offset, nbytes) for generation, part, offset, nbytes, _ in ranges)
    ticket = wire.FetchTicket(nonce=call.nonce, ranges=asked, verify=verify)
    reader = client.do_get(fl.Ticket(ticket.to_json()), call.options())
    try:
        call.check_proof(reader.read_chunk().app_metadata)
        _scatter(reader, [as_bytes(out) for *_, out in ranges], verify)
    except BaseException:
        reader.cancel()
        raise


def _scatter(reader: fl.FlightStreamReader, outs: list[np.ndarray], verify: bool) -> None:
    """Spreads a stream's bytes over `outs`, in order."""
    targets = iter([out for out in outs if out.nbytes])
    target = next(targets, None)
    for data, expected in _arrays(reader):
        digester = Digester()
        while data.nbytes:
            if target is None:
                raise StoreError("more bytes came than were asked for")
            count = min(target.nbytes, data.nbytes)
            if verify:
                copy_into_digest(target[:count], data[:count], digester)
            else:
                np.copyto(target[:count], data[:count])
            data, target = data[count:], target[count:]
            target = target if target.nbytes else next(targets, None)
        if verify and digester.result() != expected:
            raise IntegrityError("a chunk arrived with another digest than it was sent with")
    if target is not None:
        raise StoreError("the stream ended early")


def _arrays(reader: Any) -> Iterator[tuple[np.ndarray, str]]:
    """A stream's chunks as uint8 arrays without a copy, with what the sender said about each."""
    if reader.schema != _SCHEMA:
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
        yield chunk.data.column(0).to_numpy(zero_copy_only=True), said.decode(errors="replace")


def _send(writer: fl.FlightStreamWriter, reader: fl.FlightStreamReader, chunks: Iterable[Any]) -> int:
    sent = 0
    for piece in _cut(as_bytes(chunk) for chunk in chunks):
        try:
            writer.write_batch(_batch(piece))
        except (pa.ArrowException, OSError):
            # Writing only says that the stream is broken; reading says why.
            reader.read_chunk()
            raise
        sent += piece.nbytes
    return sent


def _batch(data: np.ndarray | memoryview) -> pa.RecordBatch:
    """A record batch over the same memory."""
    column = pa.Array.from_buffers(pa.uint8(), data.nbytes, [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([column], schema=_SCHEMA)


def _cut(buffers: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for data in buffers:
        for start in range(0, data.nbytes, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _pack(views: Iterable[memoryview]) -> Iterator[np.ndarray]:
    """The same bytes in chunks: large pieces as they are, runs of small ones copied together."""
    small: list[memoryview] = []
    nbytes = 0
    for view in views:
        large = view.nbytes >= _PACK_BELOW_BYTES
        if small and (large or nbytes + view.nbytes > CHUNK_BYTES):
            yield as_bytes(b"".join(small))
            small, nbytes = [], 0
        if large:
            yield from _cut([as_bytes(view)])
        else:
            small.append(view)
            nbytes += view.nbytes
    if small:
        yield as_bytes(b"".join(small))


def _split(ranges: Sequence[Range], streams: int) -> list[list[Range]]:
    """Spreads ranges over `streams` lists of about equal bytes, cutting those that lie across."""
    total = sum(nbytes for *_, nbytes, _ in ranges)
    share = max(1, -(-total // max(1, streams)))
    shares: list[list[Range]] = [[]]
    room = share
    for generation, part, offset, nbytes, out in ranges:
        data, done = as_bytes(out), 0
        while done < nbytes:
            count = min(room, nbytes - done)
            shares[-1].append((generation, part, offset + done, count, data[done : done + count]))
            done, room = done + count, room - count
            if room == 0:
                shares.append([])
                room = share
    return shares


def _describe_push(header: PushHeader) -> str:
    return f"pushing {header.total_bytes} bytes of rank {header.source_rank}, generation {header.generation}"


def _describe_fetch(ranges: Sequence[Range]) -> str:
    first = f", first {ranges[0][1]} of generation {ranges[0][0]}" if ranges else ""
    return f"fetching {sum(nbytes for *_, nbytes, _ in ranges)} bytes in {len(ranges)} ranges{first}"


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Sends this package's errors to the peer as what they are, and everything else as a failed store."""
    try:
        yield
    except fl.FlightError:
        raise
    except Exception as error:
        raise fl.FlightServerError(wire.error_to_text(error)) from error
