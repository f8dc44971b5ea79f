"""A TCP proxy on loopback between a client and a server, with the failures of a network: latency, cuts, errors."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class Proxy:
    """Forwards connections to a port. Closed at the end of a `with` block.

    Attributes:
        latency_s: Before each piece that goes from the client to the server.
        on_request: Called with each such piece; returns bytes to answer instead of forwarding it, `CUT` to close the
            connection, or None to forward it.
        num_connections: So far.
    """

    CUT = b""

    def __init__(self, port: int) -> None:
        self._port = port
        self.latency_s = 0.0
        self.on_request: Callable[[bytes], bytes | None] = lambda piece: None
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            self._open |= {client, server}
            for source, sink, inspect in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=(source, sink, inspect), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, inspect: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if inspect:
                    time.sleep(self.latency_s)
                    answer = self.on_request(piece)
                    if answer is not None:
                        if answer:
                            source.sendall(answer)
                        break
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)


def error_response(status: int, code: str) -> bytes:
    """An S3 error, after which the connection is closed."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Error\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
