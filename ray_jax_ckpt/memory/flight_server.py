"""The serving side of the transfer: sends bytes of a store's memory, and takes bytes in, for who knows the secret."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import StoreError
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.incoming import Incoming, Meeting
from ray_jax_ckpt.memory.stream import SCHEMA, pack, to_batch
from ray_jax_ckpt.memory.tls import Tls
from ray_jax_ckpt.memory.wire import PushHeader
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.observe import faults

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_LOG_EVERY_S = 60.0
_MAX_INTRUDERS = 1024
_STREAMS = (fl.FlightMethod.DO_EXCHANGE, fl.FlightMethod.DO_PUT)
_REFUSED = "the run's secret is missing or wrong"


class Provider(Protocol):
    """What a store does for its server, in many threads at once. Errors of this package reach the peer as they are."""

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
        """The buffer is filled and verified, or (not `ok`) is to be released. Raising refuses the push."""
        ...


class FlightServer:
    """Serves one store's memory to the run's other stores and workers, on a port of its own, from background threads.

    Args:
        secret: The run's secret. Who lacks it is refused, and logged at most once a minute per address.
        provider: Where bytes come from and go to.
        host: The IP address to listen on: the node's, as its peers reach it.
        tls: Certificates; None to serve unencrypted.
    """

    def __init__(self, secret: str, provider: Provider, host: str, tls: Tls | None = None) -> None:
        name = f"[{host}]" if ":" in host else host
        self._server = _Server(secret, provider, name, tls)
        self.address: str = self._server.address

    def close(self) -> None:
        """Stops serving. Waits for calls in progress, 5 s at most: no stalled peer holds a store back. Idempotent."""
        # A plain thread, since Arrow's own shutdown waits for a stalled peer for ever.
        closer = threading.Thread(target=self._server.shutdown, name="rjc-flight-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_S)


class _Auth(fl.ServerMiddleware):
    def __init__(self, ok: bool) -> None:
        super().__init__()
        self.ok = ok


class _AuthFactory(fl.ServerMiddlewareFactory):
    """Checks every call's token.

    It marks most calls only, since middleware cannot see the peer's address for the log. Calls in which the caller
    would go on talking end here: their handler, in a thread of its own, would wait for a word that may never come.
    """

    def __init__(self, token: str, intruders: _Intruders) -> None:
        super().__init__()
        self.token, self._intruders = token, intruders

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> _Auth:
        found = headers.get(wire.AUTH_HEADER, [])
        given = found[0] if len(found) == 1 else ""
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        auth = _Auth(bool(self.token) and wire.same(self.token, text))
        if not auth.ok and info.method in _STREAMS:
            self._intruders.log("")
            raise fl.FlightUnauthenticatedError(_REFUSED)
        return auth


class _Intruders:
    """Remembers who was logged when. Bounded, since anybody can connect from many addresses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}

    def log(self, peer: str) -> None:
        host = peer.rpartition(":")[0] or "an address that a stream does not tell"
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

    def __init__(self, secret: str, provider: Provider, host: str, tls: Tls | None) -> None:
        self._intruders = _Intruders()
        factory = _AuthFactory("", self._intruders)
        scheme, options = (wire.TLS_SCHEME, tls.server_options()) if tls else (wire.PLAIN_SCHEME, {})
        super().__init__(f"{scheme}://{host}:0", middleware={"auth": factory}, **options)
        self.address = f"{scheme}://{host}:{self.port}"
        # Until here, while the port was unknown, no token was accepted.
        factory.token = wire.call_token(secret, self.address)
        self._secret = secret
        self._provider = provider
        self._meeting = Meeting()

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.GeneratorStream:
        self._admit(context)
        with _reported():
            request = wire.FetchTicket.from_json(ticket.ticket)
        return fl.GeneratorStream(SCHEMA, self._answer(request))

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        self._admit(context)
        with _reported():
            if descriptor.path:
                self._join(wire.JoinRequest.from_json(descriptor.path[0]), reader, writer)
            else:
                request = wire.PushRequest.from_json(descriptor.command or b"")
                target = self._provider.begin_receive(request.header)
                self._receive(request, target, reader, writer, context.is_cancelled)
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
            raise fl.FlightUnauthenticatedError(_REFUSED)

    def _refuse(self, context: fl.ServerCallContext) -> None:
        self._admit(context)
        raise NotImplementedError("a store serves DoGet and DoExchange only")

    def _answer(self, request: wire.FetchTicket) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        with _reported():
            proof = wire.server_proof(self._secret, self.address, request.nonce)
            yield to_batch(memoryview(b"")), proof.encode()
            for chunk in pack(self._read(request)):
                said = digest(chunk).encode() if request.verify else b""
                yield to_batch(faults.tamper("serve", request.ranges[0][0], chunk)), said

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
        cancelled: Callable[[], bool],
    ) -> None:
        header = request.header
        try:
            faults.reach("receive", Generation.parse(header.generation).step)
            incoming = Incoming(target, header, request.all_bands)
            with self._meeting.host(request.nonce, incoming):
                self._prove(request.nonce, writer)
                incoming.take(0, reader)
                incoming.finish(cancelled)
        except BaseException:
            self._provider.end_receive(header, ok=False)
            raise
        self._provider.end_receive(header, ok=True)

    def _join(
        self, request: wire.JoinRequest, reader: fl.MetadataRecordBatchReader, writer: fl.MetadataRecordBatchWriter
    ) -> None:
        """Another stream of a push."""
        incoming = self._meeting.find(request.nonce)
        self._prove(request.nonce, writer)
        incoming.take(request.band, reader)

    def _prove(self, nonce: str, writer: fl.MetadataRecordBatchWriter) -> None:
        writer.write_metadata(wire.server_proof(self._secret, self.address, nonce).encode())


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Sends this package's errors to the peer as what they are, and everything else as a failed store."""
    try:
        yield
    except fl.FlightError:
        raise
    except Exception as error:
        raise fl.FlightServerError(wire.error_to_text(error)) from error
