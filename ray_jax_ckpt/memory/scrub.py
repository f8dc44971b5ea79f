"""The slow background check of held memory: bytes that went bad are found before they are needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from ray_jax_ckpt.digest import Digester
from ray_jax_ckpt.memory.content import Check, Content
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.model.shards import Generation

logger = logging.getLogger(__name__)

# The training that runs beside it is slowed by less than this share of one core, and of what one core takes of the
# memory's bandwidth.
DUTY = 0.01
# About a millisecond of work at a time.
PIECE_BYTES = 8 << 20
_MIN_PAUSE_S = 0.002


class Scrub:
    """Digests all that a shelf holds again, in a daemon thread, and drops what is bad.

    What is being filled is not looked at. What is freed while it is looked at is left alone.

    Args:
        shelf: What to look at.
        found: Told of a generation of which something was bad and has been dropped.
    """

    def __init__(self, shelf: Shelf, found: Callable[[Generation], None]) -> None:
        self._shelf, self._found = shelf, found
        self._changed = threading.Condition()
        self._interval_s: float | None = None
        self._thread: threading.Thread | None = None

    def every(self, interval_s: float | None) -> None:
        """Sets how long to wait between two looks at everything; None stops them."""
        with self._changed:
            self._interval_s = interval_s
            if interval_s is not None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def once(self) -> None:
        """One look at everything, in the calling thread, as slowly as ever."""
        for generation, content, segment in self._shelf.everything():
            for part in list(content.places):
                if not self._good(content, part, segment.view()) and self._shelf.drop_bad(content, [part]):
                    logger.warning("Part %s of step %d has gone bad in memory.", part, generation.step)
                    self._found(generation)

    def _run(self) -> None:
        while True:
            self._wait()
            try:
                self.once()
            except Exception:
                logger.exception("Checking held snapshots failed; it goes on.")

    def _wait(self) -> None:
        """Until the interval has passed, counted anew when it is changed."""
        with self._changed:
            while True:
                interval_s = self._interval_s
                if interval_s is None or self._changed.wait(interval_s):
                    self._changed.wait_for(lambda: self._interval_s is not None)
                    continue
                return

    def _good(self, content: Content, part: str, buffer: np.ndarray) -> bool:
        place = content.places.get(part)
        if place is None:
            return True
        start, size = place
        return all(self._matches(content, buffer[start : start + size], check) for check in content.checks[part])

    def _matches(self, content: Content, data: np.ndarray, check: Check) -> bool:
        offset, length, expected = check
        digester, worked_s = Digester(), 0.0
        for at in range(offset, offset + length, PIECE_BYTES):
            if not self._shelf.has(content):
                return True
            begin = time.thread_time()
            digester.update(data[at : min(at + PIECE_BYTES, offset + length)])
            worked_s += time.thread_time() - begin
            worked_s = _pause(worked_s)
        _pause(worked_s, at_least_s=0.0)
        return digester.result() == expected


def _pause(worked_s: float, at_least_s: float = _MIN_PAUSE_S) -> float:
    """Rests in proportion to the work done; returns the work that no rest has been taken for."""
    rest_s = worked_s * (1 - DUTY) / DUTY
    if rest_s < at_least_s:
        return worked_s
    time.sleep(rest_s)
    return 0.0
