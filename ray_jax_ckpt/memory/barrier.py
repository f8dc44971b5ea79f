"""Ranks meeting in the coordinator: all come with the same value in time, or everybody learns who did not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

from ray_jax_ckpt.errors import RestoreError, RestoreTimeoutError


class Barrier:
    """Meetings by key, for use in one event loop."""

    def __init__(self) -> None:
        self._met: dict[Hashable, dict[int, str]] = {}
        self._changed = asyncio.Condition()

    async def meet(self, key: Hashable, rank: int, value: str, size: int, timeout_s: float) -> None:
        """Returns when `size` ranks have come with the same value. Coming again with the same value is fine.

        Raises:
            RestoreError: A rank came with another value.
            RestoreTimeoutError: Somebody is missing after `timeout_s`; the message names the ranks.
        """
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            present = self._met.setdefault(key, {})
            present[rank] = value
            self._changed.notify_all()
            while len(present) < size and len(set(present.values())) == 1:
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    missing = sorted(set(range(size)) - present.keys())
                    raise RestoreTimeoutError(
                        f"rank {rank} waited {timeout_s:g} s for ranks {missing}, which have not restored. Every rank "
                        f"has "
                        "to call restore; raise timeout_s if they need longer."
                    ) from None
            if len(set(present.values())) > 1:
                raise RestoreError(f"Ranks restored different snapshots: {dict(sorted(present.items()))}.")
