"""What every hook of the callback keeps to: it does not raise into the controller, and the time it takes is known."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray_jax_ckpt.errors import RunInUseError

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


class HookTimes:
    """How often each hook was called, and how long it took. Pickles."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float, float]] = {}

    def add(self, hook: str, seconds: float) -> None:
        """A hook was called."""
        count, total, longest = self._found.get(hook, (0, 0.0, 0.0))
        self._found[hook] = count + 1, total + seconds, max(longest, seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """By hook: calls, and seconds of all and of the longest one."""
        return {
            hook: {"calls": count, "total_s": round(total, 6), "longest_s": round(longest, 6)}
            for hook, (count, total, longest) in self._found.items()
        }


def safe(hook: Hook) -> Hook:
    """A hook that never raises: an exception in one ends the run in spite of `max_failures`.

    But for RunInUseError, which is to end it. The object has `times`, which learn how long it took.
    """

    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        except RunInUseError:
            raise
        except Exception:
            logger.exception("CheckpointManager.%s failed; training goes on without what it does.", hook.__name__)
            return None
        finally:
            self.times.add(hook.__name__, time.perf_counter() - start)

    return guarded  # pyright: ignore[reportReturnType]
