"""Signs of life: which stores live, which are dead, and what was lost on the way between them and the books."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from ray_jax_ckpt.memory.roster import ANSWER_TIMEOUT_S
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model.shards import Generation

if TYPE_CHECKING:
    from ray_jax_ckpt.memory.ledger import Ledger

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
# A store that has not answered for so many heartbeats in a row, of `ANSWER_TIMEOUT_S` each, is replaced.
MAX_MISSED_HEARTBEATS = 3
# When stores are gone or draining, pushes under way may go where they do not count: they are made up for sooner.
DEGRADED_PATIENCE_S = 3.0


class Pulse:
    """Heartbeats to all stores of a ledger, in its event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._auditing = asyncio.Lock()
        self._missed: Counter[str] = Counter()
        self._beating: set[str] = set()
        self._lacking: tuple[Generation, float] | None = None

    async def beat(self) -> None:
        """Tells the stores that the run lives, notices those that do not, and makes up for what was lost on the way."""
        while True:
            for name, handle in list(self._ledger.roster.handles.items()):
                if name not in self._beating:
                    self._ledger.spawn(self._beat_one(name, handle))
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._restore_overdue()
                if not self._auditing.locked():
                    self._ledger.spawn(self._audit())
            except Exception:
                logger.exception("Looking for missing copies failed; trying again.")

    async def _beat_one(self, name: str, handle: ActorHandle) -> None:
        self._beating.add(name)
        try:
            if name in self._ledger.unheard:
                await self._meet(name, handle)
                return
            statement = await asyncio.wait_for(handle.heartbeat.remote(), ANSWER_TIMEOUT_S)
            self._missed.pop(name, None)
            await self._ledger.hear([statement])
        except ActorDiedError:
            # By now another store may have its name.
            if self._ledger.roster.handles.get(name) is handle:
                logger.warning("Store %s died; what only it held is lost.", name)
                await self._dead(name)
        except (RayError, TimeoutError) as error:
            if (
                self._ledger.roster.handles.get(name) is handle
                and name in self._ledger.books.domains.keys() | self._ledger.unheard
            ):
                logger.warning("Store %s does not answer: %r", name, error)
                self._missed[name] += 1
                if self._missed[name] >= MAX_MISSED_HEARTBEATS:
                    ray.kill(handle)
                    await self._dead(name)
        finally:
            self._beating.discard(name)

    async def _meet(self, name: str, handle: ActorHandle) -> None:
        """Takes in a store that did not answer before. It refuses what is of earlier attempts than the current one."""
        ledger = self._ledger
        inventory = await asyncio.wait_for(ledger.roster.who(ledger.books.attempt)(handle), ANSWER_TIMEOUT_S)
        if name in self._ledger.unheard:
            self._ledger.adopt(handle, inventory)
            self._ledger.learn([inventory.group])
            if name in {self._ledger.roster.name(member) for member in self._ledger.members}:
                self._ledger.spawn(self._ledger.form_group(self._ledger.books.attempt))
            await self._ledger.notify()

    async def ask_all(self, names: Iterable[str]) -> bool:
        """Has stores say what they hold; whether all of them did."""
        handles = self._ledger.roster.among(names)
        answers = await self._ledger.roster.ask(lambda store: store.heartbeat.remote(), handles)
        await self._ledger.hear(answers.values())
        return answers.keys() == set(names)

    async def _audit(self) -> None:
        """Abandons what ranks have passed without a word that arrived, which would keep its buffers for ever."""
        async with self._auditing:
            found = self._ledger.books.passed()
            if found and await self.ask_all(list(self._ledger.books.domains)):
                for generation in found & self._ledger.books.passed():
                    self._ledger.books = books_.abandoned(
                        self._ledger.books, generation, "a rank has gone on without it"
                    )
                    self._ledger.say_abandoned([generation])
                await self._ledger.notify()

    async def mourn(self, name: str) -> None:
        """A store is dead. What only it held is known when all others have said what they hold."""
        handle, incarnation = self._ledger.roster.handles.get(name), self._ledger.books.incarnations.get(name)
        sure = await self.ask_all([other for other in self._ledger.books.domains if other != name])
        # By now another store may have its name.
        known = self._ledger.roster.handles.get(name), self._ledger.books.incarnations.get(name)
        if known[0] is handle and known[1] == incarnation:
            self._missed.pop(name, None)
            self._ledger.lose(name, dead=True, sure=sure)

    async def _dead(self, name: str) -> None:
        await self.mourn(name)
        self._ledger.restore_copies()
        await self._ledger.notify()

    def _restore_overdue(self) -> None:
        """Makes up for pushes that gave up: with too few copies, the newest generation would free nothing for ever."""
        newest = pushes.lacking(self._ledger.books)
        if newest is None:
            self._lacking = None
        elif self._lacking is None or self._lacking[0] != newest:
            self._lacking = (newest, time.monotonic())
        elif time.monotonic() - self._lacking[1] > self._patience():
            self._lacking = None
            self._ledger.spawn(self._ledger.repair(newest))
            self._ledger.restore_copies()

    def _patience(self) -> float:
        timeout_s = self._ledger.timeout_s
        return min(timeout_s, DEGRADED_PATIENCE_S) if self._ledger.books.degraded() else timeout_s
