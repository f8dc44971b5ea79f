"""What each rank did last, for messages about those that are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable

MAX_NAMED = 5


class Activities:
    """For use in one event loop."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, float]] = {}

    def clear(self) -> None:
        """A new group starts."""
        self._last.clear()

    def note(self, rank: int, what: str) -> None:
        """A rank is doing something from now on."""
        self._last[rank] = what, time.monotonic()

    def describe(self, ranks: Iterable[int]) -> str:
        """What some ranks did last, and how long ago."""
        named = sorted(ranks)
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return "; ".join(map(self._one, named[:MAX_NAMED])) + more

    def _one(self, rank: int) -> str:
        if rank not in self._last:
            return f"rank {rank} has called neither restore nor snapshot in this attempt"
        what, when = self._last[rank]
        return f"rank {rank} {what} {time.monotonic() - when:.1f} s ago"
