"""What goes from storage: superfluous checkpoints, and what writers that failed or died have left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.replies import reply
from ray_jax_ckpt.memory.uploads import Destination
from ray_jax_ckpt.model.persistence import pause_s

logger = logging.getLogger(__name__)

GRACE_S = 10.0
LOOK_INTERVAL_S = 0.5
DURABLE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Removal:
    """A directory that is to go.

    Attributes:
        path: Which.
        how: The method of a store that removes it: of a checkpoint; of a try that has failed; of what an earlier driver
            left, unless it has become a checkpoint.
        step: Of a checkpoint.
    """

    path: str
    how: Literal["remove_checkpoint", "discard_upload", "clear_upload"]
    step: int | None = None


class Removals:
    """Done by stores, in the background of one event loop: no checkpoint waits for a removal, or fails with it.

    Args:
        ledger: Knows the stores.
        config: How often and for how long it is tried.
        run: Whose storage.
        record: Notes events.
        durable: Waits until no state on storage names a checkpoint that is superfluous; says what is wrong.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: PersistConfig,
        run: RunIdentity,
        record: Callable[..., None],
        durable: Callable[[float], Awaitable[str]],
    ) -> None:
        self._ledger, self._config, self._run, self._record = ledger, config, run, record
        self._durable = durable
        self._waiting: dict[str, Removal] = {}
        self._num_running = 0

    def add(self, removal: Removal) -> None:
        """It is begun with the next `begin`."""
        self._waiting[removal.path] = removal

    def begin(self) -> None:
        """Begins what waits. What could not be removed the last time is tried again."""
        waiting, self._waiting = self._waiting, {}
        for removal in waiting.values():
            self._num_running += 1
            self._ledger.spawn(self._remove(removal))

    async def settle(self, timeout_s: float) -> None:
        """Waits for what is under way: the stores may end next."""
        deadline = time.monotonic() + timeout_s
        while self._num_running and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _remove(self, removal: Removal) -> None:
        try:
            said = await self._durable(DURABLE_TIMEOUT_S) if removal.how == "remove_checkpoint" else ""
            said = said or await self._try(removal)
        finally:
            self._num_running -= 1
        if said:
            logger.warning("%s stays for now, and is removed with the next one that is: %s", removal.path, said)
            self._record("remove_failed", step=removal.step, path=removal.path, error=said[:1000])
            self.add(removal)
        elif removal.step is not None:
            self._record("checkpoint_removed", step=removal.step, path=removal.path)

    async def _try(self, removal: Removal) -> str:
        """Why it is still there; "" if it is not."""
        to = Destination.of(self._run, removal.path, self._config.timeout_s, self._ledger.roster.driver)
        said = "no store lives"
        for failures in range(self._config.retries + 1):
            if failures:
                await asyncio.sleep(pause_s(failures))
            handle: Any = next(iter(self._ledger.roster.handles.values()), None)
            try:
                if handle is not None:
                    await asyncio.wait_for(reply(getattr(handle, removal.how).remote(to)), to.timeout_s + GRACE_S)
                    return ""
            except Exception as error:
                said = str(error) or f"storage did not do it within {to.timeout_s:g} s"
        return said
