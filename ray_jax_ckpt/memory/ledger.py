"""The books of a run kept in step with its living stores: who joins, who is lost, who holds what, what is freed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import RestoreError
from ray_jax_ckpt.memory import damage
from ray_jax_ckpt.memory.asked import Asked
from ray_jax_ckpt.memory.barrier import Bell
from ray_jax_ckpt.memory.fleet import was_restarted
from ray_jax_ckpt.memory.messages import Group, Inventory, Located, Member, assemble_view
from ray_jax_ckpt.memory.pulse import Pulse
from ray_jax_ckpt.memory.roster import ANSWER_TIMEOUT_S, Roster, store_settings
from ray_jax_ckpt.memory.shared_work import SharedWork
from ray_jax_ckpt.memory.wire import is_encrypted
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model.books import Books, Held, Statement, Status
from ray_jax_ckpt.model.choice import passed_over
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults

logger = logging.getLogger(__name__)

START_TRIES = 3
SETTLE_DELAY_S = 0.01


class Ledger:
    """For use in one event loop.

    Attributes:
        books: What the stores hold, by their own reports.
        roster: Whom to call.
        members: The current worker group.
        unheard: Stores that live and have not answered this coordinator yet.
        pulse: Notices which stores live.
        first_attempt: Of the run as it was started anew; nothing of earlier ones is restored.
        before_freeing: Called when it is time to look for free buffers; returns generations that are not to be freed.
    """

    def __init__(self, run: str, config: SnapshotConfig, record: Callable[..., None]) -> None:
        self.books = Books(copies=config.copies, reject_differing=config.on_replica_mismatch == "reject")
        self.roster = Roster(run, config)
        self.members: tuple[Member, ...] = ()
        self.first_attempt = 0
        self.secret = ""
        self.changed = Bell()
        self._standing: tuple[Books | None, Mapping[Generation, Status]] = (None, {})
        self._config, self._record = config, record
        self._early: dict[str, list[Held]] = {}
        self._forming = asyncio.Lock()
        self._settling: asyncio.TimerHandle | None = None
        self.pulse = Pulse(self)
        self.before_freeing: Callable[[], frozenset[Generation]] = frozenset
        self._examining: set[tuple[str, Generation]] = set()
        self._verifying = SharedWork()
        self.unheard: set[str] = set()
        self._restarted = was_restarted()
        self._asked = Asked()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Nor is anything freed before a driver's first decision: it may only look, and what stores say they hold has
        # not been verified for it. A coordinator that was killed in mid-attempt goes on as before.
        self._keeping = not self._restarted

    @property
    def timeout_s(self) -> float:
        """Bound of its waits."""
        return self._config.timeout_s

    # Work in the background.

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside what else happens; its failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("Background work of the coordinator failed.", exc_info=task.exception())

    def stop(self) -> None:
        """Ends what runs in the background: a group that is being formed would start again what is ended next."""
        for task in self._tasks:
            task.cancel()

    async def notify(self) -> None:
        """Soon looks for free buffers and wakes waiters.

        Reports come by the thousand in a large group, and all ranks may be waiting for one generation: judging, and
        waking everybody, at each report would cost the square of the group.
        """
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_DELAY_S, self._settle)

    def standing(self) -> Mapping[Generation, Status]:
        """The status of every generation; worked out once for all who ask."""
        if self._standing[0] is not self.books:
            self._standing = self.books, {g: self.books.status(g) for g in self.books.entries}
        return self._standing[1]

    # Stores come and go.

    def adopt(self, handle: ActorHandle, inventory: Inventory) -> None:
        """Takes a living store into the books with exactly what it says that it holds."""
        name = inventory.name
        if self.secret and inventory.secret != self.secret:
            logger.error("Store %s has another secret than this run and is left alone.", name)
            self.roster.forget(name)
            return
        if is_encrypted(inventory.address) != (self._config.tls is not None):
            # It was started with another setting, and nobody of this run can talk to it.
            logger.warning("Store %s was started with another SnapshotConfig.tls; it ends, with what it holds.", name)
            ray.kill(handle)
            self.roster.forget(name)
            return
        self.roster.know(handle, inventory)
        # The group's own view of a domain counts: the setting may have changed since the store was started.
        domain = next((m.domain for m in self.members if self.roster.name(m) == name), inventory.domain)
        numbers = inventory.incarnation, inventory.statement.number
        self.books = books_.store_joined(self.books, name, domain, inventory.attempt, *numbers)
        self.unheard.discard(name)
        # What it reported between its answer and this line is not in the answer.
        for report in (*inventory.held, *self._early.pop(inventory.incarnation, ())):
            self.books = books_.held(self.books, report)

    def learn(self, groups: Iterable[Group | None]) -> None:
        """What the stores know of the group that they serve, for a coordinator that has forgotten it.

        The group is formed again: a member's store may have been silent before, and not have heard of it either.
        """
        known = [group for group in groups if group is not None and group.attempt == self.books.attempt]
        if self._restarted and not self.members and known:
            self.members, self.first_attempt = known[0].members, known[0].first_attempt
            names = [self.roster.name(member) for member in self.members]
            self.books = books_.group_learned(self.books, known[0].attempt, names, known[0].choice)
            self.spawn(self.form_group(known[0].attempt))

    async def report(self, report: Held) -> None:
        """A store says what it holds."""
        if report.store not in self.books.domains:
            self._early.setdefault(report.incarnation, []).append(report)
        else:
            if self._note(report):
                self.spawn(self.repair(report.generation))
            await self.notify()

    def _note(self, report: Held) -> bool:
        """Takes a report into the books. Whether it has shown copies to be bad, for which `repair` is to be called."""
        before = self.books
        self.books = books_.held(before, report)
        self.say_abandoned(self.books.abandoned.keys() - before.abandoned.keys())
        return self._look(before, report.generation)

    def _look(self, before: Books, generation: Generation) -> bool:
        news = damage.news(before, self.books, generation)
        damage.say_damaged(generation, news.damaged, self._record)
        return bool(news)

    async def hear(self, statements: Iterable[Statement]) -> None:
        """Stores say everything that they hold."""
        for statement in statements:
            before, self.books = self.books, books_.stated(self.books, statement)
            self.say_abandoned(self.books.abandoned.keys() - before.abandoned.keys())
            for report in statement.held:
                if self._look(before, report.generation):
                    self.spawn(self.repair(report.generation))
            if self.books is not before:
                await self.notify()

    async def repair(self, generation: Generation) -> None:
        """Has bad copies of a generation replaced by good ones, where there are any."""
        entry = self.books.entries.get(generation)
        if entry is not None and (differing := entry.differing()):
            living = self.roster.among(self.books.domains)
            for report in await damage.drop_differing(self.roster, living, generation, differing, self._record):
                self._note(report)
        self._copy(pushes.repairs_due(self.books, generation))

    def say_abandoned(self, generations: Iterable[Generation]) -> None:
        """Warns of generations, and records them."""
        for gone in generations:
            logger.warning("Step %d cannot be restored: %s.", gone.step, self.books.abandoned[gone])
            self._record("abandoned", step=gone.step, reason=self.books.abandoned[gone])

    def lose(self, name: str, *, dead: bool, sure: bool = True, silent: bool = False) -> None:
        """A store is dead, or has ended, or (`silent`) lives, does not answer and is left out.

        `sure`: all others have said what they hold, so that what only this one held is lost.
        """
        self.roster.forget(name)
        self.unheard.discard(name)
        self._early.pop(self.books.incarnations.get(name, ""), None)
        if name in self.books.domains or name in self.books.silent:
            transition = books_.store_died if dead and sure else books_.store_lost
            if silent and name in self.books.domains:
                transition = books_.store_silent
            self.books = transition(self.books, name)
            self._record("store_lost", store=name, dead=dead)

    async def end(self, name: str) -> None:
        """Ends a store that is taken to be dead; returns when its name is free."""
        handle = self.roster.handles.get(name)
        await self.pulse.mourn(name)
        if handle is not None:
            await self.roster.end(name, handle)

    async def refresh(self, attempt: int) -> None:
        """Rebuilds the books from what the living stores say, who refuse writes of older attempts from then on.

        Raises:
            RestoreError: Stores that live but do not answer hold what could not be restored without them.
        """
        handles, dead = dict(self.roster.handles), set()
        inventories = await self.roster.ask(
            self.roster.who(attempt),
            handles,
            timeout_s=self._config.timeout_s,
            enough=lambda answers: self.books.does_without(self._missing(answers) - dead, dead),
            dead=dead,
        )
        silent = self._missing(inventories) - dead
        if not self.books.does_without(silent, dead):
            raise RestoreError(
                f"Stores {sorted(silent)} live but have not answered within {self._config.timeout_s:g} s, and without "
                "them less, or nothing, could be restored. Raise SnapshotConfig.timeout_s if they are only slow."
            )
        # First what the living ones hold: what a dead one held may be there, and nobody has heard of it yet.
        for name, inventory in inventories.items():
            self.adopt(handles[name], inventory)
        for name in dead:
            self.lose(name, dead=True)
        for name in silent:
            self.lose(name, dead=False, silent=True)
            self.await_word(name, handles[name])

    def _missing(self, answers: Mapping[str, Any]) -> set[str]:
        """Who should have answered. One that has only been started, and is on its way, holds nothing."""
        return (self.books.domains.keys() | self.unheard) - answers.keys()

    def await_word(self, name: str, handle: ActorHandle) -> None:
        """A store that lived before and does not answer: it may hold anything, and is taken in when it does."""
        self.roster.handles.setdefault(name, handle)
        self.unheard.add(name)
        if name not in self.books.silent:
            self.books = books_.store_silent(self.books, name)

    async def replace(self, member: Member) -> ActorHandle:
        """A member's store, which seemed dead to its worker: the same if it answers, else a new one."""
        async with self._forming:
            name = self.roster.name(member)
            handle = self.roster.handles.get(name)
            if handle is not None and await self._answers(handle):
                return handle
            logger.warning("Store %s is dead; what only it held is lost.", name)
            await self.end(name)
            handle = self.roster.of(member, self.secret, self.books.attempt)
        self.spawn(self.form_group(self.books.attempt, replaced=True))
        return handle

    async def _answers(self, handle: ActorHandle) -> bool:
        try:
            await asyncio.wait_for(handle.pid.remote(), ANSWER_TIMEOUT_S)
        except (RayError, TimeoutError):
            return False
        return True

    async def form_group(self, attempt: int, *, replaced: bool = False) -> None:
        """Waits for the members' stores, tells them of each other, and brings what is restored back to its copies.

        Also what this attempt took itself, if a store was `replaced`; else its pushes are on their way.
        """
        async with self._forming:
            answers = await self._gather_members(attempt)
            if attempt != self.books.attempt:
                return
            ranks = {self.roster.name(member): member.rank for member in self.members}
            addresses = {ranks[name]: inventory.address for name, inventory in answers.items()}
            choice = self.books.decided[1] if self.books.decided else None
            settings = store_settings(self._config)
            group = Group(attempt, addresses, settings, self.members, choice, self.first_attempt)
            handles = self.roster.among(answers)
            others = {name: handle for name, handle in self.roster.handles.items() if name not in ranks}
            for handle in others.values():
                handle.leave_group.remote(attempt)
            await self.roster.ask(lambda store: store.join_group.remote(group), handles)
            self.books = books_.group_formed(self.books, attempt, ranks)
        newest = self.books.newest()
        if newest is not None and (replaced or newest.attempt < attempt):
            await self.repair(newest)
            self.restore_copies()
        await self.notify()

    async def _gather_members(self, attempt: int) -> dict[str, Inventory]:
        answers: dict[str, Inventory] = {}
        members = {self.roster.name(member): member for member in self.members}
        for _ in range(START_TRIES):
            handles = {name: self.roster.of(member, self.secret, attempt) for name, member in members.items()}
            answers = await self.roster.ask_when_started(self.roster.who(attempt), handles)
            if attempt != self.books.attempt:
                break
            for name, inventory in answers.items():
                if self.books.incarnations.get(name) != inventory.incarnation:
                    self.adopt(handles[name], inventory)
            silent = members.keys() - answers.keys()
            if not silent:
                break
            for name in silent:
                logger.warning("Store %s did not start; trying again.", name)
                await self.end(name)
        return answers

    # Copies, and buffers.

    def restore_copies(self) -> None:
        """Has the newest complete generation copied to as many domains as there should be."""
        due = pushes.copies_due(self.books)
        self._copy(self._asked.new(copies, self.books, self._config.timeout_s) for copies in due)

    def _copy(self, due: Iterable[pushes.Copies]) -> None:
        for copies in due:
            handle, address = self.roster.handles.get(copies.source), self.roster.addresses.get(copies.target)
            if handle is not None and address is not None and copies.parts:
                handle.push.remote(copies.generation, copies.parts, copies.target, address)

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Nothing is freed meanwhile: what is newer may turn out to be damaged when it is verified."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False
            await self.notify()

    def _settle(self) -> None:
        """Tells the stores which generations are free, and ends stores that nobody needs any more."""
        self._settling = None
        self.changed.ring()
        if self._keeping:
            return
        free = self.books.releasable() - self.before_freeing()
        if free:
            faults.reach("free", max(free).step)
            for handle in self.roster.handles.values():
                handle.release.remote(free)
            self.books = books_.released(self.books, free)
        for name in self.books.idle():
            handle = self.roster.handles.get(name)
            if handle is not None:
                ray.kill(handle)
            self.lose(name, dead=False)

    # Generations.

    async def verify(self, generation: Generation, handles: Mapping[str, ActorHandle]) -> bool:
        """Has stores digest what they hold of a generation again; they drop what is bad, and it is struck out here.

        Returns:
            Whether something was.
        """
        answers = await self.roster.ask(
            lambda store: store.verify.remote(generation), handles, timeout_s=self._config.timeout_s
        )
        found = False
        for name in handles:
            report = answers.get(name)
            if report is not None and name in self.books.domains:
                found |= self._note(report)
            elif (entry := self.books.entries.get(generation)) is not None:
                self.books = books_.dropped(self.books, name, generation, entry.expected())
        return found

    async def examine(self, name: str, generation: Generation) -> None:
        """Has one store verify a generation, and makes copies of what it lost. One that does not answer lost all."""
        if name not in self.roster.handles or (name, generation) in self._examining:
            return
        self._examining.add((name, generation))
        try:
            await self.verify(generation, {name: self.roster.handles[name]})
        finally:
            self._examining.discard((name, generation))
        self.restore_copies()
        await self.notify()

    async def locate(self, generation: Generation, lease: Lease | None = None) -> Located | None:
        """Where the parts and the indices are, by the stores' own word; None if some are missing.

        The books are not asked: what is kept for a handle is on the stores after they have forgotten it. With a lease
        it stays there, and its digests are checked first.
        """
        handles = self.roster.among(self.books.domains)
        if lease is not None:
            leased = await self.roster.ask(lambda store: store.lease.remote(lease), handles)
            handles = {name: handles[name] for name in leased}
            if self._config.verify:
                # All ranks come at once, and the bytes are the same for all.
                key = generation, frozenset(handles)
                damaged, first = await self._verifying.get(key, lambda: self.verify(generation, handles))
                if damaged and first:
                    self.spawn(self.repair(generation))
        answers = await self.roster.ask(lambda store: store.view.remote(generation), handles)
        entry = self.books.entries.get(generation)
        return assemble_view(generation, answers.values(), {} if entry is None else entry.differing())

    async def choose(self, attempt: int, avoided: Collection[Generation] = ()) -> Located | None:
        """Walks back, newest first, to a generation whose every part some store holds intact.

        Those that are `avoided` only where there is no other one.

        Raises:
            RestoreError: One was found, and its stores stopped answering.
        """
        faults.reach("decide", next((generation.step for generation in self.books.complete()), -1))
        self.books = passed_over(self.books, self.first_attempt, avoided)
        while (choice := books_.attempt_started(self.books, attempt)[1]) is not None and self._config.verify:
            await self.verify(choice, self.roster.among(self.books.domains))
            if choice in self.books.complete():
                break
            logger.warning("Step %d is damaged; all ranks go back to an older one.", choice.step)
        self.books = books_.attempt_started(self.books, attempt)[0]
        names = [self.roster.name(member) for member in self.members]
        self.books = books_.group_forming(self.books, attempt, names)
        await self.notify()
        if choice is None:
            return None
        located = await self.locate(choice)
        if located is None:
            raise RestoreError(f"Step {choice.step} was chosen, but the stores that hold it stopped answering.")
        return located
