"""Coroutines of any event loop that wait for something that any thread changes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Waiters:
    """Thread-safe. Waking needs no running event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    def wake(self) -> None:
        """Something has changed: all look again."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for loop, future in waiting:
            # A loop that is closed has nobody left in it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_finish, future)

    async def until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until it is ready, at most so long. Returns whether it is."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            future: asyncio.Future[None] = loop.create_future()
            # Before it is asked: what changes between the two is not missed.
            with self._lock:
                self._waiting.add((loop, future))
            try:
                if ready():
                    return True
                await asyncio.wait_for(future, None if deadline is None else max(0.0, deadline - loop.time()))
            except TimeoutError:
                return ready()
            finally:
                with self._lock:
                    self._waiting.discard((loop, future))


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
