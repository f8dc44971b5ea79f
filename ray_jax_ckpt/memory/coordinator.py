"""The actor that keeps a run's books: who holds what, what is complete, what may be freed, what is restored."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.fs
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import (
    RestoreError,
    RestoreTimeoutError,
    SnapshotError,
    SnapshotLostError,
    SnapshotTimeoutError,
)
from ray_jax_ckpt.memory.barrier import Barrier
from ray_jax_ckpt.memory.messages import Decision, Group, Inventory, Located, Member, assemble_view
from ray_jax_ckpt.memory.roster import ANSWER_TIMEOUT_S, Roster
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.recovery import choose_push
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe.events import EventLog

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
STORE_START_TRIES = 3
SETTLE_DELAY_S = 0.01


@dataclass(frozen=True)
class RunIdentity:
    """Which run this is, and where its directory lies."""

    digest: str
    path: str
    filesystem: pyarrow.fs.FileSystem | None


class Coordinator:
    """One per run, an asyncio actor owned by the train controller's process (it dies with the driver).

    It holds nothing that the stores do not hold: a new one rebuilds its books from their inventories.
    """

    def __init__(self, run: RunIdentity, config: SnapshotConfig) -> None:
        self._run, self._config = run, config
        self._books = Books(copies=config.copies)
        self._roster = Roster(run.digest, config)
        self._early: dict[str, list[Held]] = {}
        self._members: tuple[Member, ...] = ()
        self._secret = ""
        self._changed = asyncio.Condition()
        self._barrier = Barrier()
        self._settling: asyncio.TimerHandle | None = None
        self._events = EventLog(run.filesystem, run.path)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opened = asyncio.Lock()
        self._me = ray.get_runtime_context().current_actor

    # Life.

    async def open(self) -> None:
        """Finds and takes over what lives of this run. Idempotent; every other call does it first."""
        async with self._opened:
            if self._secret:
                return
            handles = await self._roster.living()
            inventories = await self._roster.ask(self._inventory, handles)
            for name, inventory in inventories.items():
                self._adopt(handles[name], inventory)
            self._secret = next((one.secret for one in inventories.values()), "") or secrets.token_urlsafe(32)
            self._spawn(self._beat())

    async def finish(self, keep: bool) -> None:
        """The run is over. Stores end now, or (`keep`) when nobody has taken them over for their orphan timeout."""
        await self.open()
        # A group that is still being formed would start again what ends here.
        for task in self._tasks:
            task.cancel()
        if not keep:
            for name, handle in list(self._roster.handles.items()):
                ray.kill(handle)
                self._roster.forget(name)
        await asyncio.to_thread(self._events.flush, ANSWER_TIMEOUT_S)

    def record(self, event: str, at: float, fields: dict[str, Any]) -> None:
        """Adds an event to the run's log."""
        self._events.add(event, at=at, **fields)

    # A worker group starts.

    async def begin_attempt(self, members: tuple[Member, ...]) -> Decision:
        """Fences older attempts, chooses what is restored, and gives every member a store. One decision for all ranks.

        The newest generation that the stores can serve completely, with digests verified, is chosen; one that fails the
        verification is passed over by all ranks together.
        """
        await self.open()
        attempt = self._books.attempt + 1
        await self._refresh(attempt)
        located = await self._choose(attempt)
        self._members = members
        handles = {member.rank: self._roster.of(member, self._secret) for member in members}
        self._spawn(self._form_group(attempt))
        step = located.generation.step if located else None
        self._events.add(
            "decision", attempt=attempt, step=step, generation=str(located.generation) if located else None
        )
        return Decision(attempt, members, handles, self._secret, located)

    async def replace_store(self, rank: int, attempt: int) -> ActorHandle:
        """A rank found its store dead: a new, empty one on the same node."""
        member = self._members[rank]
        name = self._roster.name(member)
        await self._roster.end(name)
        self._lose(name)
        if attempt == self._books.attempt:
            self._spawn(self._form_group(attempt))
        return self._roster.of(member, self._secret)

    # Stores and workers report.

    async def held(self, report: Held) -> None:
        """A store holds more verified parts than before."""
        if report.store not in self._books.domains:
            self._early.setdefault(report.store, []).append(report)
            return
        known = self._books.abandoned
        self._books = books_.held(self._books, report)
        for generation in self._books.abandoned.keys() - known.keys():
            logger.warning("Step %d cannot be restored: %s.", generation.step, self._books.abandoned[generation])
        await self._notify()

    async def abandon(self, generation: Generation, reason: str) -> None:
        """A rank did not take, or could not store, this generation: it can never become complete."""
        if generation.attempt == self._books.attempt:
            self._books = books_.abandoned(self._books, generation, reason)
            self._events.add("abandoned", step=generation.step, reason=reason)
            await self._notify()

    # Workers ask.

    async def latest(self) -> Generation | None:
        """The newest complete generation."""
        await self.open()
        return next(iter(self._books.complete()), None)

    async def must_wait(self) -> bool:
        """Whether one was abandoned since the newest complete generation: busy ranks then wait instead of skipping."""
        newest = next(iter(self._books.complete()), None)
        return any(newest is None or generation > newest for generation in self._books.abandoned)

    async def wait(self, generation: Generation, status: Status, timeout_s: float) -> tuple[int, int]:
        """Waits until a generation is complete or protected.

        Returns:
            Distinct domains that every part of it (or of what replaced it) is in, and copies wanted.

        Raises:
            SnapshotError: It was abandoned.
            SnapshotTimeoutError: It was not ready in time; the message says what is missing.
        """
        good = (Status.COMPLETE, Status.PROTECTED) if status is Status.COMPLETE else (Status.PROTECTED,)
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while True:
                reason = self._books.abandoned.get(generation)
                if reason:
                    raise SnapshotError(f"The snapshot of step {generation.step} was abandoned: {reason}.")
                ready = [g for g in self._books.entries if g >= generation and self._books.status(g) in good]
                if ready:
                    return min(map(len, self._books.covered(min(ready)))), self._config.copies
                try:
                    await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
                except TimeoutError:
                    raise SnapshotTimeoutError(self._not_ready(generation, status, timeout_s)) from None

    async def locate(self, generation: Generation, rank: int) -> Located:
        """Leases a complete generation for a reader, and says where it is. `confirm` or `let_go` ends the lease.

        Raises:
            SnapshotLostError: It is not complete (any more).
        """
        attempt = self._books.attempt
        located = await self._locate(generation, Lease(f"restore {attempt} {rank}", generation, attempt))
        if located is None:
            self.let_go(rank)
            held = [g.step for g in self._books.complete()]
            raise SnapshotLostError(
                f"Step {generation.step} (generation {generation}) is not held completely; complete steps: {held}."
            )
        return located

    async def confirm(self, rank: int, number: int, generation: Generation, timeout_s: float) -> None:
        """Every rank says what it restored, and goes on when all said the same.

        Raises:
            RestoreError: Ranks restored different generations.
            RestoreTimeoutError: Ranks that have not come in time; they are named.
        """
        key = ("restore", self._books.attempt, number)
        try:
            values = await self._barrier.gather(key, rank, str(generation), len(self._members), timeout_s)
        except TimeoutError as error:
            raise RestoreTimeoutError(
                f"Restoring step {generation.step}: {error}, which have not restored. Every rank has to call restore; "
                f"raise "
                "timeout_s if they need longer."
            ) from None
        if len(set(values.values())) > 1:
            raise RestoreError(f"Ranks restored different snapshots: {values}.")
        self.let_go(rank)

    def let_go(self, rank: int) -> None:
        """A rank reads no more, because it is done or failed."""
        for handle in self._roster.handles.values():
            handle.unlease.remote(f"restore {self._books.attempt} {rank}")

    async def number_processes(self, attempt: int, rank: int, process_index: int, timeout_s: float) -> dict[int, int]:
        """Every rank tells its JAX process index at its first snapshot, and learns whose is whose: rank by index.

        Raises:
            SnapshotTimeoutError: Ranks that have not come in time; they are named.
        """
        try:
            found = await self._barrier.gather(
                ("processes", attempt), rank, process_index, len(self._members), timeout_s
            )
        except TimeoutError as error:
            raise SnapshotTimeoutError(
                f"First snapshot: {error}, which have not called snapshot. Every rank has to; raise timeout_s if they "
                f"need "
                "longer."
            ) from None
        return {index: member for member, index in found.items()}

    # Inside: stores come and go.

    def _adopt(self, handle: ActorHandle, inventory: Inventory) -> None:
        """Takes a living store into the books with exactly what it says that it holds."""
        name = inventory.name
        self._roster.know(handle, inventory)
        self._books = books_.store_joined(self._books, name, inventory.domain, inventory.attempt)
        # What it reported between its answer and this line is not in the answer.
        for report in (*inventory.held, *self._early.pop(name, ())):
            self._books = books_.held(self._books, report)

    async def _refresh(self, attempt: int) -> None:
        """Rebuilds the books from what the living stores say, who refuse writes of older attempts from then on."""
        handles = dict(self._roster.handles)

        def enough(answers: Mapping[str, Any]) -> bool:
            """Whether what is restored is the same with and without the stores that are silent."""
            books = self._books
            for name in handles.keys() - answers.keys():
                books = books_.store_lost(books, name)
            return bool(books.complete()) and books.complete()[0] == self._books.complete()[0]

        inventories = await self._roster.ask(
            lambda store: store.inventory.remote(self._me, attempt), handles, enough=enough
        )
        for name in handles.keys() - inventories.keys():
            self._lose(name)
        for name, inventory in inventories.items():
            self._adopt(handles[name], inventory)

    def _lose(self, name: str) -> None:
        self._roster.forget(name)
        if name in self._books.domains:
            self._books = books_.store_lost(self._books, name)
            self._events.add("store_lost", store=name)

    async def _form_group(self, attempt: int) -> None:
        """Waits for the members' stores, tells them of each other, and brings what is restored back to its copies."""
        answers: dict[str, Inventory] = {}
        members = {self._roster.name(member): member for member in self._members}
        for _ in range(STORE_START_TRIES):
            handles = {name: self._roster.of(member, self._secret) for name, member in members.items()}
            answers = await self._roster.ask_when_started(self._inventory, handles)
            if attempt != self._books.attempt:
                return
            for name, inventory in answers.items():
                if name not in self._books.domains:
                    self._adopt(handles[name], inventory)
            silent = members.keys() - answers.keys()
            if not silent:
                break
            for name in silent:
                logger.warning("Store %s did not start; trying again.", name)
                await self._roster.end(name)
        self._books = books_.group_formed(self._books, attempt, answers)
        names = {members[name].rank: name for name in answers}
        group = Group(attempt, {rank: self._roster.addresses[name] for rank, name in names.items()}, names)
        await self._roster.ask(lambda store: store.join_group.remote(group), {n: handles[n] for n in answers})
        self._restore_copies()
        await self._notify()

    def _inventory(self, store: ActorHandle) -> Any:
        return store.inventory.remote(self._me)

    async def _beat(self) -> None:
        """Tells the stores that the run lives, and notices those that do not."""
        while True:
            await asyncio.gather(*(self._beat_one(name, handle) for name, handle in self._roster.handles.items()))
            await asyncio.sleep(HEARTBEAT_S)

    async def _beat_one(self, name: str, handle: ActorHandle) -> None:
        try:
            await asyncio.wait_for(handle.heartbeat.remote(), ANSWER_TIMEOUT_S)
        except ActorDiedError:
            # By now another store may have its name.
            if self._roster.handles.get(name) is handle:
                logger.warning("Store %s died; what only it held is lost.", name)
                self._lose(name)
                self._restore_copies()
                await self._notify()
        except (RayError, TimeoutError) as error:
            if name in self._books.domains:
                logger.warning("Store %s does not answer: %r", name, error)

    # Inside: generations.

    async def _choose(self, attempt: int) -> Located | None:
        """Walks back, newest first, to a generation whose every part some store holds intact."""
        while True:
            choice = books_.attempt_started(self._books, attempt)[1]
            if choice is None or await self._verified(choice):
                break
            logger.warning("Step %d is damaged; all ranks go back to an older one.", choice.step)
        self._books = books_.attempt_started(self._books, attempt)[0]
        await self._notify()
        return None if choice is None else await self._locate(choice)

    async def _verified(self, generation: Generation) -> bool:
        """Has every holder digest its parts again, and strikes bad ones out.

        Whether the generation is still complete.
        """
        if not self._config.verify:
            return True
        holders = self._holders(generation)
        stores = {name for names in holders.values() for name in names}
        good = await self._roster.ask(
            lambda store: store.verify.remote(generation), self._handles(stores), timeout_s=self._config.timeout_s
        )
        for name in stores - good.keys():
            self._lose(name)
        for name, parts in good.items():
            bad = {part for part, names in holders.items() if name in names} - parts
            if bad:
                logger.warning("Store %s: parts %s of step %d are damaged.", name, sorted(bad), generation.step)
                self._books = books_.dropped(self._books, name, generation, bad)
        return generation in self._books.complete()

    async def _locate(self, generation: Generation, lease: Lease | None = None) -> Located | None:
        """Where the parts and the indices are, by the stores' own word; None if some are missing.

        The books are not asked: what is kept for a handle is on the stores after they have forgotten it.
        """
        handles = self._handles(self._books.domains)
        if lease is not None:
            leased = await self._roster.ask(lambda store: store.lease.remote(lease), handles)
            handles = {name: handles[name] for name in leased}
        answers = await self._roster.ask(lambda store: store.view.remote(generation), handles)
        return assemble_view(generation, answers.values())

    def _handles(self, names: Iterable[str]) -> dict[str, ActorHandle]:
        return {name: self._roster.handles[name] for name in names}

    def _holders(self, generation: Generation) -> dict[str, list[str]]:
        entry = self._books.entries[generation]
        return {part: sorted(stores & self._roster.handles.keys()) for part, stores in entry.holders.items()}

    def _restore_copies(self) -> None:
        newest = next(iter(self._books.complete()), None)
        if newest is None:
            return
        lacking = self._books.undercovered(newest)
        jobs: dict[tuple[str, str], list[str]] = {}
        for part, source, target in choose_push(
            lacking, self._books.domains, self._books.receivers(), self._books.wanted()
        ):
            jobs.setdefault((source, target), []).append(part)
        for (source, target), parts in jobs.items():
            self._roster.handles[source].push.remote(newest, tuple(parts), target, self._roster.addresses[target])

    async def _notify(self) -> None:
        """Wakes waiters now, and looks for free buffers soon: many reports come together."""
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_DELAY_S, self._settle)
        async with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Tells the stores which generations are free, and ends stores that nobody needs any more."""
        self._settling = None
        free = self._books.releasable()
        if free:
            for handle in self._roster.handles.values():
                handle.release.remote(free)
            self._books = books_.released(self._books, free)
        for name in self._books.idle():
            ray.kill(self._roster.handles[name])
            self._lose(name)

    def _not_ready(self, generation: Generation, status: Status, timeout_s: float) -> str:
        if generation not in self._books.entries:
            found = "no store has reported any of it"
        elif missing := self._books.missing(generation):
            found = f"no verified copy of {missing[:5]}{' and more' if len(missing) > 5 else ''}"
        else:
            found = f"too few copies of {sorted(self._books.undercovered(generation))[:5]}"
        ranks = {name: m.rank for m in self._members for name in [self._roster.name(m)]}
        silent = sorted(rank for name, rank in ranks.items() if name not in self._books.domains)
        return (
            f"Step {generation.step} was not {status} within {timeout_s:g} s: {found}; ranks without a living store: "
            f"{silent}. "
            "Every rank has to snapshot the same steps; raise timeout_s if copying needs longer."
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
