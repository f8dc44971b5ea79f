"""Work that several callers ask for at the same time, and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any


class SharedWork:
    """For use in one event loop."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}

    async def get(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, bool]:
        """What `work` returns, or what it raises.

        It goes on for the others when a caller is cancelled.

        Args:
            key: Of the work: callers with the same one share it while it runs.
            work: Starts it.

        Returns:
            The result, and whether this caller is the one that started it.
        """
        task, first = self._running.get(key), False
        if task is None:
            first, task = True, asyncio.ensure_future(work())
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task), first
