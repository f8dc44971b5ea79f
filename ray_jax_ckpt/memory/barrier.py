"""Waiting in the coordinator: for something to change, and for all ranks to come, or to learn who did not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import Any


class Bell:
    """Wakes all who wait for it to ring next, for use in one event loop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes those who wait now."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def heard(self, timeout_s: float) -> None:
        """Waits for the next ring. Raises TimeoutError."""
        await asyncio.wait_for(self._rung.wait(), timeout_s)


class MissingRanks(TimeoutError):
    """Ranks that have not come in time.

    Attributes:
        ranks: Which.
    """

    def __init__(self, rank: int, ranks: list[int], timeout_s: float) -> None:
        super().__init__(f"rank {rank} waited {timeout_s:g} s for ranks {ranks}")
        self.ranks = ranks


class Barrier:
    """Meetings by key, for use in one event loop."""

    def __init__(self) -> None:
        self._met: dict[Hashable, dict[int, Any]] = {}
        self._changed = asyncio.Condition()

    async def gather(self, key: Hashable, rank: int, value: Any, size: int, timeout_s: float) -> dict[int, Any]:
        """Returns every rank's value when `size` ranks have come. Coming again is fine.

        Raises:
            MissingRanks: Somebody is missing after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            present = self._met.setdefault(key, {})
            present[rank] = value
            self._changed.notify_all()
            while len(present) < size:
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    missing = sorted(set(range(size)) - present.keys())
                    raise MissingRanks(rank, missing, timeout_s) from None
            return dict(sorted(present.items()))
