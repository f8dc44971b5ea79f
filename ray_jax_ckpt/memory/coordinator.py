"""The actor that keeps a run's books: who holds what, what is complete, what may be freed, what is restored."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle

from ray_jax_ckpt.config import PersistConfig, SnapshotConfig
from ray_jax_ckpt.errors import (
    RestoreError,
    RestoreTimeoutError,
    SnapshotError,
    SnapshotLostError,
    SnapshotTimeoutError,
    StaleAttemptError,
)
from ray_jax_ckpt.memory.activities import Activities
from ray_jax_ckpt.memory.announce import Announcer, Ear, Word
from ray_jax_ckpt.memory.barrier import Barrier, MissingRanks
from ray_jax_ckpt.memory.books_file import BooksFile, this_driver
from ray_jax_ckpt.memory.chooser import Chooser
from ray_jax_ckpt.memory.claim import DriverIdentity, Incumbent, incumbent
from ray_jax_ckpt.memory.drain import Drain
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.memory.messages import Decision, Located, Member, RunIdentity, StoredCheckpoint, Survey
from ray_jax_ckpt.memory.persister import Persister
from ray_jax_ckpt.memory.roster import ANSWER_TIMEOUT_S
from ray_jax_ckpt.memory.stored import Stored
from ray_jax_ckpt.model import attendance as attendance_
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.attendance import Attendance, Began
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.choice import Resume
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.observe.events import EventLog
from ray_jax_ckpt.observe.log import show_log
from ray_jax_ckpt.storage.files import write_whole
from ray_jax_ckpt.storage.filesystem import Place
from ray_jax_ckpt.storage.records import State

logger = logging.getLogger(__name__)


class Coordinator:
    """One per run, an asyncio actor owned by the train controller's process (it dies with the driver).

    It holds nothing that the stores do not hold: a new one rebuilds its books from their inventories.
    """

    def __init__(
        self,
        run: RunIdentity,
        config: SnapshotConfig,
        persist: PersistConfig | None,
        resume: Resume,
        driver: DriverIdentity | None,
        controller: ActorHandle | None,
    ) -> None:
        show_log()
        self._config, self._run_name = config, run.name
        self._driver, self._controller = driver, controller
        self._surveyed: dict[Generation, float] = {}
        self._books_file = BooksFile(run, lambda: getattr(self._books.newest(), "step", None))
        self._events = EventLog(run.filesystem, run.path, self._books_file.heard, write=write_whole)
        self._ledger = Ledger(run.digest, config, self._events.add)
        self._barrier, self._activities, self._attendance = Barrier(), Activities(), Attendance(0)
        self._announcer = Announcer()
        self._drain = Drain(self._ledger, self._announcer, self._events.add)
        self._stored = Stored(run)
        self._chooser = Chooser(run, config, resume, self._ledger, self._stored, self._events.add)
        self._ledger.before_freeing = self._look
        self._persister = None
        if persist is not None:
            durable = self._books_file.durable
            self._persister = Persister(self._ledger, persist, run, self._stored, self._events.add, durable)
            self._drain.saved = self._persister.preempted
        self._opening, self._deciding = asyncio.Lock(), asyncio.Lock()

    # Life.

    async def open(self) -> None:
        """Finds what lives of this run. Idempotent; every other call that needs it does it first.

        The stores are only asked: they go on reporting to another living driver until an attempt of this one begins.
        """
        async with self._opening:
            if self._ledger.secret:
                return
            handles = await self._ledger.roster.living()
            dead: set[str] = set()
            inventories = await self._ledger.roster.ask(lambda store: store.inventory.remote(), handles, dead=dead)
            for name, inventory in inventories.items():
                self._ledger.adopt(handles[name], inventory)
            for name in handles.keys() - inventories.keys() - dead:
                self._ledger.await_word(name, handles[name])
            known = next((one.secret for one in inventories.values()), "")
            self._ledger.secret = known or secrets.token_urlsafe(32)
            self._ledger.learn(one.group for one in inventories.values())
            self._ledger.spawn(self._ledger.pulse.beat())
            self._ledger.spawn(self._drain.watch())
            self._ledger.spawn(self._stored.look_back(self._config.timeout_s))
            mine = this_driver(self._ledger.roster.driver, self._driver)
            self._ledger.spawn(self._books_file.open(mine, after=self._chooser.history.load()))

    async def finish(self, keep: bool, hooks: dict[str, Any] | None = None) -> None:
        """The run is over. Stores end now, or (`keep`) when nobody has taken them over for their orphan timeout."""
        if hooks is not None:
            self._events.add("hooks", hooks=hooks)
        await self.open()
        self._ledger.stop()
        if not keep:
            await self._ledger.roster.end_all(self._books.attempt)
            self._events.add("finished")
        await asyncio.to_thread(self._events.flush, ANSWER_TIMEOUT_S)
        await self._books_file.durable(ANSWER_TIMEOUT_S)

    def pid(self) -> int:
        """Process id of this coordinator."""
        return os.getpid()

    async def who(self) -> Incumbent:
        """Who trains this run, for a driver that wants to."""
        return await incumbent(self._driver, self._controller)

    def _look(self) -> frozenset[Generation]:
        self._chooser.note()
        return self._persister.look() if self._persister is not None else frozenset()

    def record(self, event: str, at: float, fields: dict[str, Any]) -> None:
        """Adds an event to the run's log."""
        self._events.add(event, at=at, **fields)
        if event == "restore_begin":
            what = fields.get("path") or f"step {fields['step']}"
            self._activities.note(fields["rank"], f"began to restore {what}")
        elif event == "reported":
            self._chooser.reported(fields["path"])

    # A worker group starts.

    async def begin_attempt(self, members: tuple[Member, ...]) -> Decision:
        """Fences older attempts, chooses what is restored, and gives every member a store. One decision for all ranks.

        The newest generation that the stores can serve completely, with digests verified, is chosen; one that fails the
        verification is passed over by all ranks together.
        """
        await self.open()
        ledger = self._ledger
        async with self._deciding, ledger.keeping():
            ledger.members = members
            await self._chooser.look()
            # Not one that storage knows of again, if no store has lived on to tell of it.
            ledger.books = books_.attempts_known(ledger.books, self._chooser.latest_attempt)
            while True:
                attempt = ledger.books.attempt + 1
                await ledger.refresh(attempt)
                # Stores may have seen later attempts than a coordinator that is new.
                if ledger.books.attempt <= attempt:
                    break
            self._activities.clear()
            self._attendance = Attendance(len(members))
            chosen = await self._chooser.choose(attempt)
            handles = {member.rank: ledger.roster.of(member, ledger.secret, attempt) for member in members}
        self._drain.begin()
        await self._announcer.begin(attempt)
        ledger.spawn(ledger.form_group(attempt))
        if self._persister is not None:
            self._persister.begin_group(chosen.generation, members)
        given = chosen.located, self._drain.leaving(), chosen.stored, chosen.ray_counts, chosen.needed
        return Decision(attempt, members, handles, ledger.secret, *given)

    async def replace_store(self, rank: int, attempt: int) -> ActorHandle:
        """A rank found its store dead: the same one if it answers after all, else a new, empty one on the same node.

        Raises:
            StaleAttemptError: A newer attempt has started.
        """
        await self.open()
        self._check_attempt(attempt)
        return await self._ledger.replace(self._ledger.members[rank])

    # The controller reports.

    async def preempted(self, ranks: tuple[int, ...], deadline_ms: int) -> None:
        """Ray Train says that these ranks' nodes will be taken away; `deadline_ms` since the epoch, or 0."""
        self._chooser.preempted()
        await self._drain.preempted(ranks, deadline_ms)

    async def gone(self, ranks: tuple[int, ...]) -> None:
        """These ranks' processes are dead. Of snapshots that only they lack, as much as possible is saved."""
        await self._drain.gone(ranks)

    async def failed(self, crash: Sequence[str] = ()) -> None:
        """The worker group has failed, with these kinds of errors. What memory holds is worth a copy on storage now."""
        await self.open()
        self._chooser.failed(crash)
        if self._persister is not None:
            self._persister.failed()

    async def settle(self) -> str:
        """Training has ended: what is due is written. Returns what could not be; "" if all is on storage."""
        await self.open()
        return await self._persister.settle() if self._persister is not None else ""

    async def persist_problem(self) -> str:
        """Why training is to fail because of storage (`PersistConfig.fail_after`); "" while it is not."""
        return self._persister.fatal if self._persister is not None else ""

    async def checkpoints(self, consistency: str | None, timeout_s: float) -> tuple[Place | None, State]:
        """Where the run is, and what is known of its checkpoints. See `BooksFile.settled`."""
        await self.open()
        return self._books_file.place, await self._books_file.settled(consistency, timeout_s)

    # Stores and workers report.

    async def listen(self, ear: Ear) -> tuple[str, int, tuple[Word, ...]]:
        """What is announced to a rank. See `Announcer.listen`."""
        await self.open()
        return await self._announcer.listen(ear)

    async def held(self, report: Held) -> None:
        """A store holds more verified parts than before.

        A coordinator that was killed and started again learns by this that it has to find its stores.
        """
        await self.open()
        faults.reach("report", report.generation.step)
        await self._ledger.report(report)

    async def abandon(self, generation: Generation, reason: str) -> None:
        """A rank did not take, or could not store, this generation. One that is complete all the same stays."""
        await self.open()
        ledger, before = self._ledger, self._books
        ledger.books = books_.given_up(before, generation, reason)
        if ledger.books is not before:
            self._events.add("abandoned", step=generation.step, reason=reason)
            await ledger.notify()

    async def began(self, report: Began) -> None:
        """A rank snapshots a generation. If ranks differ in steps or trees, the generations concerned are given up."""
        if report.generation.attempt != self._books.attempt:
            return
        self._activities.note(report.rank, f"snapshotted step {report.generation.step}")
        self._chooser.begun(report.generation)
        self._attendance, hopeless = attendance_.began(self._attendance, report)
        for generation, reason in hopeless.items():
            if generation not in self._books.abandoned:
                logger.warning("Step %d cannot be restored: %s.", generation.step, reason)
            await self.abandon(generation, reason)

    # Workers ask.

    async def latest(self) -> Generation | None:
        """The newest complete generation."""
        await self.open()
        return self._books.newest()

    async def must_wait(self) -> bool:
        """Whether busy ranks wait instead of skipping. See `Books.must_wait`."""
        await self.open()
        return self._books.must_wait()

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
        await self.open()
        while True:
            reason = self._books.abandoned.get(generation)
            if reason:
                raise SnapshotError(f"The snapshot of step {generation.step} was abandoned: {reason}.")
            ready = [g for g, found in self._ledger.standing().items() if g >= generation and found in good]
            if ready:
                return min(map(len, self._books.covered(min(ready)))), self._config.copies
            try:
                await self._ledger.changed.heard(deadline - time.monotonic())
            except TimeoutError:
                raise SnapshotTimeoutError(self._not_ready(generation, status, timeout_s)) from None

    async def locate(self, generation: Generation, rank: int, attempt: int) -> Located:
        """Leases a complete generation for a reader, and says where it is. `confirm` or `let_go` ends the lease.

        Raises:
            SnapshotLostError: It is not complete (any more).
        """
        await self.open()
        self._check_attempt(attempt)
        located = await self._ledger.locate(generation, Lease(f"restore {attempt} {rank}", generation, attempt))
        if located is None:
            self.let_go(rank, attempt)
            held = [g.step for g in self._books.complete()]
            raise SnapshotLostError(
                f"Step {generation.step} (generation {generation}) is not held completely; complete steps: {held}."
            )
        return located

    async def survey(self, generation: Generation, timeout_s: float) -> Survey:
        """Where a generation is, once it is complete. The same for all ranks, and no lease.

        Raises:
            SnapshotError: It was abandoned.
            SnapshotTimeoutError: It was not complete in time.
            SnapshotLostError: It is not held any more.
        """
        await self.open()
        if generation.attempt == self._books.attempt:
            # The report of the asking rank's own store may still be on its way.
            await self.wait(generation, Status.COMPLETE, timeout_s)
        located = await self._ledger.locate(generation)
        if located is None:
            raise SnapshotLostError(
                f"Step {generation.step} (generation {generation}) is not held completely (any more). Take snapshots "
                "that are to be reported with force=True, which keeps them until they are written."
            )
        self._surveyed = {g: at for g, at in self._surveyed.items() if g >= generation or g in self._books.entries}
        created_at_s = self._surveyed.setdefault(generation, time.time())
        return Survey(located, self._run_name, created_at_s)

    async def confirm(
        self, rank: int, attempt: int, number: int, generation: Generation | StoredCheckpoint, timeout_s: float
    ) -> None:
        """Every rank says what it restored, and goes on when all said the same.

        Raises:
            RestoreError: Ranks restored different generations.
            RestoreTimeoutError: Ranks that have not come in time; they are named.
        """
        await self.open()
        self._check_attempt(attempt)
        key = ("restore", attempt, number)
        try:
            values = await self._barrier.gather(key, rank, str(generation), self._num_members(), timeout_s)
        except MissingRanks as error:
            raise RestoreTimeoutError(
                f"Restoring step {generation.step}: {error}, which have not restored: "
                f"{self._activities.describe(error.ranks)}. Every rank has to call restore; raise timeout_s if they "
                "need longer."
            ) from None
        if len(set(values.values())) > 1:
            raise RestoreError(
                f"Ranks restored different snapshots (attempt.restores.step, or path, by rank): {values}. All of them "
                "have to restore what get_checkpoint() returned, a handle of the same step, or the same path."
            )
        self._activities.note(rank, f"restored step {generation.step}")
        if number == 1:
            self._chooser.confirmed()
        self.let_go(rank, attempt)

    async def suspect(self, store: str, generation: Generation, attempt: int, said: str) -> None:
        """A reader did not get what a store holds of a generation: the store looks, and lost copies are made again."""
        if attempt == self._books.attempt:
            logger.warning("Store %s could not serve step %d: %s", store, generation.step, said)
            self._events.add("suspected", store=store, step=generation.step, said=said)
            await self._ledger.examine(store, generation)

    async def suspect_stored(self, path: str, attempt: int, said: str) -> None:
        """A rank could not restore a checkpoint on storage."""
        if attempt == self._books.attempt:
            self._events.add("suspected", path=path, said=said)
            self._stored.suspect(path, said)

    def let_go(self, rank: int, attempt: int, failed: str = "") -> None:
        """A rank reads no more, because it is done or `failed`."""
        if failed and attempt == self._books.attempt:
            self._activities.note(rank, f"failed to restore ({failed})")
        for handle in self._ledger.roster.handles.values():
            handle.unlease.remote(f"restore {attempt} {rank}")

    async def number_processes(self, attempt: int, rank: int, process_index: int, timeout_s: float) -> dict[int, int]:
        """Every rank tells its JAX process index at its first snapshot, and learns whose is whose: rank by index.

        Raises:
            SnapshotTimeoutError: Ranks that have not come in time; they are named.
        """
        try:
            await self.open()
            self._check_attempt(attempt)
            found = await self._barrier.gather(
                ("processes", attempt), rank, process_index, self._num_members(), timeout_s
            )
        except MissingRanks as error:
            raise SnapshotTimeoutError(
                f"First snapshot: {error}, which have not called snapshot: {self._activities.describe(error.ranks)}. "
                "Every rank has to; raise timeout_s if they need longer."
            ) from None
        return {index: member for member, index in found.items()}

    # Inside.

    def _num_members(self) -> int:
        if not self._ledger.members:
            raise SnapshotError("The coordinator was started again in mid-attempt and does not know the group.")
        return len(self._ledger.members)

    def _check_attempt(self, attempt: int) -> None:
        if attempt != self._books.attempt:
            raise StaleAttemptError(
                f"This run is at attempt {self._books.attempt}; the request is of attempt {attempt}, which has been "
                "replaced."
            )

    @property
    def _books(self) -> Books:
        return self._ledger.books

    def _not_ready(self, generation: Generation, status: Status, timeout_s: float) -> str:
        absent = range(len(self._ledger.members))
        if generation in self._books.entries:
            missing = self._books.missing(generation)
            absent = [rank for rank in absent if host_part_id(rank) in missing]
        if generation not in self._books.entries:
            found = "no store has reported any of it"
        elif missing := self._books.missing(generation):
            found = f"no verified copy of {missing[:5]}{' and more' if len(missing) > 5 else ''}"
        else:
            found = f"too few copies of {sorted(self._books.undercovered(generation))[:5]}"
        ranks = {name: m.rank for m in self._ledger.members for name in [self._ledger.roster.name(m)]}
        silent = sorted(rank for name, rank in ranks.items() if name not in self._books.domains)
        doing = self._activities.describe(absent) or "every rank has stored its own part"
        return (
            f"Step {generation.step} was not {status} within {timeout_s:g} s: {found}; ranks without a living store: "
            f"{silent}; {doing}. Every rank has to snapshot the same steps; raise timeout_s if copying needs longer."
        )
