"""The receiving half of a push, of which several streams may bring a band each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ray_jax_ckpt.errors import CheckpointError, StoreError
from ray_jax_ckpt.memory.stream import Guard, fill
from ray_jax_ckpt.memory.wire import Band, PushHeader

LOOK_INTERVAL_S = 0.5
REMEMBERED = 64


class Incoming:
    """One push that is being received: the stream that began it answers for all."""

    def __init__(self, target: np.ndarray, header: PushHeader, bands: tuple[Band, ...]) -> None:
        """`target` gets the bytes, as long as `close` has not been called."""
        self._target, self._header, self._bands = target, header, bands
        self._guards = [Guard() for _ in bands]
        self._changed = threading.Condition()
        self._waiting = set(range(len(bands)))
        self._arrived: set[int] = set()
        self._error: CheckpointError | None = None

    def take(self, number: int, reader: Any) -> None:
        """Puts a band in its place, and verifies it. Raises IntegrityError, or StoreError."""
        with self._changed:
            if self._error is not None:
                raise _bare(self._error)
            if number not in self._waiting:
                raise StoreError(f"band {number} of {len(self._bands)} is not awaited, or has come")
            self._waiting.discard(number)
        try:
            fill(self._target, self._header, reader, self._bands[number], self._guards[number])
        except BaseException as error:
            # What went wrong first is why the others are given up, and what the sender is to be told.
            raise _bare(self._end(error)) from error
        with self._changed:
            self._arrived.add(number)
            self._changed.notify_all()

    def finish(self, cancelled: Callable[[], bool]) -> None:
        """Waits until all bands are in their places, or the sender is gone. Raises what went wrong with any."""
        with self._changed:
            while self._error is None and len(self._arrived) < len(self._bands):
                self._changed.wait(LOOK_INTERVAL_S)
                if cancelled():
                    raise StoreError("the sender has given up")
            if self._error is not None:
                raise _bare(self._error)

    def close(self) -> CheckpointError:
        """Nothing is written to the target any more. Returns what streams that come now are told."""
        error = self._end(StoreError("the push that this stream belongs to is over"))
        for guard in self._guards:
            guard.close()
        return error

    def _end(self, error: BaseException) -> CheckpointError:
        with self._changed:
            self._error = self._error or _bare(error)
            self._waiting.clear()
            self._changed.notify_all()
            return self._error


class Meeting:
    """Pushes under way, where the streams that bring them find each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Incoming] = {}
        self._over: dict[str, CheckpointError] = {}

    @contextmanager
    def host(self, nonce: str, incoming: Incoming) -> Iterator[None]:
        """Others may join while it is open; after it nothing is written any more."""
        with self._lock:
            if nonce in self._open:
                raise StoreError("a push with this nonce is under way")
            self._open[nonce] = incoming
        try:
            yield
        finally:
            error = incoming.close()
            with self._lock:
                del self._open[nonce]
                # A stream that comes late would not know why its push has failed.
                self._over[nonce] = error
                while len(self._over) > REMEMBERED:
                    del self._over[next(iter(self._over))]

    def find(self, nonce: str) -> Incoming:
        """The push that somebody wants to join. Raises what it failed with, or StoreError, if it is over."""
        with self._lock:
            if nonce in self._open:
                return self._open[nonce]
            never = StoreError("the push that this stream belongs to has never begun")
            raise _bare(self._over.get(nonce, never))


def _bare(error: BaseException) -> CheckpointError:
    """The same error without its frames, which would keep a buffer of gigabytes alive, for every stream to raise."""
    return type(error)(str(error)) if isinstance(error, CheckpointError) else StoreError(repr(error))
