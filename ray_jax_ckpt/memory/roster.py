"""The coordinator's address book of stores, and bounded calls to many of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Inventory, Member, StoreSettings

logger = logging.getLogger(__name__)

# A living store answers in milliseconds; one that does not within this is left out.
ANSWER_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
PROMPT_S = 1.0

Question = Callable[[ActorHandle], Any]


def store_settings(config: SnapshotConfig) -> StoreSettings:
    """What of the user's settings is for the stores."""
    scrub_interval_s = config.scrub_interval_s if config.verify else None
    return StoreSettings(config.verify, scrub_interval_s, config.max_bytes, config.tls, config.streams)


class Roster:
    """Handles and addresses of a run's stores, for use in one event loop.

    Attributes:
        handles: By name; of stores that are still starting too, so that they are fenced as well.
        addresses: Flight address of each store that has answered once.
        driver: The driver's identity for stores; the same when its coordinator is started again.
    """

    def __init__(self, run: str, config: SnapshotConfig) -> None:
        self._run, self._config = run, config
        self.handles: dict[str, ActorHandle] = {}
        self.addresses: dict[str, str] = {}
        context = ray.get_runtime_context()
        self._me, self.driver = context.current_actor, context.get_actor_id() or ""

    def name(self, member: Member) -> str:
        """Name of a member's store."""
        return fleet.store_name(self._run, member)

    def of(self, member: Member, secret: str, attempt: int) -> ActorHandle:
        """A member's store, started if there is none; it refuses what is of attempts before `attempt`."""
        name = self.name(member)
        if name not in self.handles:
            settings = (self._config.orphan_timeout_s, self._config.timeout_s, store_settings(self._config))
            self.handles[name] = fleet.create_store(self._run, member, secret, attempt, *settings)
        return self.handles[name]

    def who(self, attempt: int) -> Question:
        """Asks a store who it is, and tells it to whom it reports, and whose attempt this is."""
        return lambda store: store.inventory.remote(self._me, attempt, self.driver)

    def know(self, handle: ActorHandle, inventory: Inventory) -> None:
        """A store has said who it is."""
        self.handles[inventory.name], self.addresses[inventory.name] = handle, inventory.address

    def among(self, names: Iterable[str]) -> dict[str, ActorHandle]:
        """The handles of those of the names that are known."""
        return {name: self.handles[name] for name in names if name in self.handles}

    def forget(self, name: str) -> None:
        """A store is gone."""
        self.handles.pop(name, None)
        self.addresses.pop(name, None)

    async def living(self) -> dict[str, ActorHandle]:
        """All stores of the run that Ray knows, whoever started them."""
        return await asyncio.to_thread(fleet.living_stores, self._run)

    async def end(self, name: str, handle: ActorHandle) -> None:
        """Ends a store, and returns when its name is free."""
        await asyncio.to_thread(fleet.end_store, name, handle, ANSWER_TIMEOUT_S)

    async def end_all(self, attempt: int) -> None:
        """Ends all stores, unless a later attempt goes on with them: nobody who was replaced ends what is another's."""
        answers = await self.ask(lambda store: store.inventory.remote(), self.handles, enough=bool)
        if any(answer.attempt > attempt for answer in answers.values()):
            logger.warning("The stores of this run stay: a later attempt than %d goes on with them.", attempt)
            return
        for name, handle in list(self.handles.items()):
            ray.kill(handle)
            self.forget(name)

    async def ask(
        self,
        question: Question,
        handles: Mapping[str, ActorHandle],
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        enough: Callable[[Mapping[str, Any]], bool] | None = None,
        dead: set[str] | None = None,
    ) -> dict[str, Any]:
        """Answers by name, without those of stores that failed or did not answer in time.

        Args:
            question: Calls a remote method of the handle and returns the reference.
            handles: Whom to ask.
            timeout_s: Bound of the wait for all.
            dead: Gets the names of stores that Ray knows to be dead, while answers are awaited.
            enough: Whether the answers so far will do. It is asked when some are still missing after a moment, since a
                dead node's store may let everybody wait for the whole timeout.
        """
        tasks = {name: asyncio.ensure_future(_answer(name, question(handle), dead)) for name, handle in handles.items()}
        await _wait(tasks.values(), PROMPT_S if enough is not None else timeout_s)
        if enough is not None and not enough(_answers(tasks)):
            await _wait(tasks.values(), timeout_s)
        answers = _answers(tasks)
        for task in tasks.values():
            task.cancel()
        return answers

    async def ask_when_started(self, question: Question, handles: Mapping[str, ActorHandle]) -> dict[str, Any]:
        """Like `ask`, for stores that may still be starting."""
        return await self.ask(question, handles, timeout_s=START_TIMEOUT_S)


async def _wait(tasks: Iterable[asyncio.Task[Any]], timeout_s: float) -> None:
    pending = [task for task in tasks if not task.done()]
    if pending:
        await asyncio.wait(pending, timeout=timeout_s)


def _answers(tasks: Mapping[str, asyncio.Task[tuple[Any] | None]]) -> dict[str, Any]:
    results = {name: task.result() for name, task in tasks.items() if task.done()}
    return {name: result[0] for name, result in results.items() if result is not None}


async def _answer(name: str, ref: Any, dead: set[str] | None) -> tuple[Any] | None:
    try:
        return (await ref,)
    except ActorDiedError:
        if dead is not None:
            dead.add(name)
        return None
    except (RayError, CheckpointError) as error:
        logger.debug("Store %s did not answer: %r", name, error)
        return None
