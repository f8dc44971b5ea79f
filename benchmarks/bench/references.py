"""What the machine itself can do, measured in the same processes, at the same time and on as many bytes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import xxhash

from bench.samples import Samples

_SENDER = """
import socket, sys
address, size = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2])
content = bytearray(b"x" * size)
with socket.create_connection(address) as connection:
    while connection.recv(1):
        connection.sendall(content)
"""
_RECEIVE_BYTES = 4 << 20


def measure_copies(samples: Samples, num_bytes: int, repeats: int, barrier: Callable[[], None]) -> None:
    """One thread per rank copies the bytes of its part of the state: into used memory, and into fresh memory."""
    source = np.full(num_bytes, 7, np.uint8)
    target = np.full(num_bytes, 1, np.uint8)
    for _ in range(repeats):
        barrier()
        with samples.timed("memcpy warm"):
            np.copyto(target, source)
    for _ in range(repeats):
        barrier()
        with samples.timed("xxh3"):
            xxhash.xxh3_64_intdigest(source)
    del target
    for _ in range(repeats):
        barrier()
        with samples.timed("memcpy cold"):
            target = np.empty(num_bytes, np.uint8)
            np.copyto(target, source)
        del target


class SocketPeer:
    """Another process that sends bytes over a loopback connection whenever it is asked to."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        with socket.create_server(("127.0.0.1", 0)) as server:
            arguments = [sys.executable, "-S", "-c", _SENDER, str(server.getsockname()[1]), str(num_bytes)]
            self._process = subprocess.Popen(arguments)
            server.settimeout(60)
            self._connection = server.accept()[0]

    def receive(self) -> np.ndarray:
        """Gets the bytes into fresh memory, as a restore does."""
        target = np.empty(self._num_bytes, np.uint8)
        view, found = memoryview(target), 0
        self._connection.sendall(b"g")
        while found < self._num_bytes:
            found += self._connection.recv_into(view[found : found + _RECEIVE_BYTES])
        return target

    def close(self) -> None:
        """Ends the other process."""
        self._connection.close()
        self._process.wait(30)
