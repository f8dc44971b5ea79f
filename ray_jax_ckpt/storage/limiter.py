"""A bound on how many bytes a second several threads write together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Limiter:
    """Hands out bytes at a rate; any thread may ask. Nobody gets ahead by asking for more at once.

    Args:
        bytes_per_s: The rate. None: no bound.
        clock: Seconds; monotonic.
        sleep: Called without the lock.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a rate of {bytes_per_s} bytes per second writes nothing")
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, num_bytes: int) -> None:
        """Blocks until so many bytes may be written. What was not used for a while does not add up."""
        if self._rate is None:
            return
        with self._lock:
            start = max(self._clock(), self._free_at)
            self._free_at = start + num_bytes / self._rate
        delay = start - self._clock()
        if delay > 0:
            self._sleep(delay)
