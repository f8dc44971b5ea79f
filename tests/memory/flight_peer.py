"""The other process of the transfer's tests: a store that serves, receives or pushes, and may die or stop meanwhile.

It imports little, since each test that needs it starts it anew.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import SnapshotLostError, StaleAttemptError
from ray_jax_ckpt.memory.transfer import FlightServer, PartSpan, PushHeader, fetch, push

SECRET = "the run's secret"
NUM_BYTES = 20 << 20
DATA = np.frombuffer(np.random.default_rng(0).bytes(NUM_BYTES), np.uint8)


class Shelf:
    """A provider: parts of one generation, one buffer to receive into, and a diary."""

    def __init__(self) -> None:
        self.parts: dict[str, np.ndarray] = {"w": DATA, "empty": DATA[:0]}
        self.buffer = np.zeros(NUM_BYTES, np.uint8)
        self.begun: list[PushHeader] = []
        self.ended: list[bool] = []
        self.over = threading.Event()
        self.num_reads = 0
        self.error: Exception | None = None

    def read(self, generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        self.num_reads += 1
        if part not in self.parts:
            raise SnapshotLostError(f"no part {part} here")
        return self.parts[part].data[offset : offset + nbytes]

    def begin_receive(self, header: PushHeader) -> np.ndarray:
        if header.attempt < 1:
            raise StaleAttemptError("attempt 0 is over")
        self.begun.append(header)
        return self.buffer

    def end_receive(self, header: PushHeader, ok: bool) -> None:
        self.ended.append(ok)
        self.over.set()
        if ok and self.error is not None:
            raise self.error


def header_of(data: np.ndarray, *, step: int = 1 << 20, **changes: Any) -> PushHeader:
    digests = tuple((o, min(step, data.nbytes - o), digest(data[o : o + step])) for o in range(0, data.nbytes, step))
    header = PushHeader(
        attempt=1,
        generation="1.0.5",
        source="store 0",
        parts=(PartSpan(id="w", offset=0, nbytes=data.nbytes),),
        total_bytes=data.nbytes,
        meta="{}",
        digests=digests,
    )
    return replace(header, **changes)


def main(role: str, *args: str) -> None:
    fate = args[-1] if args else ""
    if role in ("serve", "receive"):
        _serve(_Doomed(fate))
    elif role == "fetch":
        fetch(args[0], SECRET, [("1", "w", 0, 1 << 20, np.zeros(1 << 20, np.uint8))], 20)
        print(f"pandas: {'pandas' in sys.modules}", flush=True)
    elif fate in ("die", "stop"):
        push(args[0], SECRET, header_of(DATA), _chunks(fate), 3)
    else:
        push(args[0], SECRET, header_of(DATA), [DATA], 20)
        print("verified", flush=True)


class _Doomed(Shelf):
    """Ends or stops its process when its bytes are asked for, or when it has begun to receive."""

    def __init__(self, fate: str) -> None:
        super().__init__()
        self.fate = fate

    def read(self, generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        meet(self.fate)
        return super().read(generation, part, offset, nbytes)

    def begin_receive(self, header: PushHeader) -> np.ndarray:
        # A moment later, when bytes are on their way.
        threading.Timer(0.1, meet, [self.fate]).start()
        return np.empty(header.total_bytes, np.uint8)


def meet(fate: str) -> None:
    if fate:
        os.kill(os.getpid(), signal.SIGKILL if fate == "die" else signal.SIGSTOP)
        # Another thread may take the signal first, and this one would go on meanwhile.
        time.sleep(30)


def _serve(shelf: Shelf) -> None:
    server = FlightServer(SECRET, shelf, "127.0.0.1")
    print(server.address, flush=True)
    signal.pause()


def _chunks(fate: str) -> Iterator[np.ndarray]:
    yield DATA[: NUM_BYTES // 2]
    print("sending", flush=True)
    time.sleep(0.5)
    meet(fate)
    yield DATA[NUM_BYTES // 2 :]


if __name__ == "__main__":
    main(*sys.argv[1:])
