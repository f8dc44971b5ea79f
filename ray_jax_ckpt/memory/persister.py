"""Has the stores write snapshots to storage as they become due, and keeps the list of what is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.memory.messages import Located, Member, RunIdentity
from ray_jax_ckpt.memory.removals import Removal, Removals
from ray_jax_ckpt.memory.replies import GaveWayError, reply
from ray_jax_ckpt.memory.shared_storage import SharedStorage
from ray_jax_ckpt.memory.stored import Stored
from ray_jax_ckpt.memory.uploads import Destination, Pace
from ray_jax_ckpt.model import persistence
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.metrics import encode
from ray_jax_ckpt.model.persistence import Persisted, Progress
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.storage.manifest import FileRecord
from ray_jax_ckpt.storage.plan import About, DirectoryPlan, for_database, needs_database, orbax_of, plan_files

logger = logging.getLogger(__name__)

GRACE_S = 10.0
END_TRIES = 2
LOOK_INTERVAL_S = 0.5
DISCARD_TIMEOUT_S = 30.0


class Persister:
    """For use in the coordinator's event loop.

    Attributes:
        failures: In a row.
        problem: What went wrong last; empty when the last one went well.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: PersistConfig,
        run: RunIdentity,
        stored: Stored,
        record: Callable[..., None],
        durable: Callable[[float], Awaitable[str]],
    ) -> None:
        self._ledger, self._config, self._run, self._stored, self._record = ledger, config, run, stored, record
        self._preempted: set[tuple[int, int]] = set()
        self._progress = Progress(None, time.monotonic())
        self._restored: Generation | None = None
        self._wanted = ""
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._ending = False
        self._changed = asyncio.Event()
        self._claimed: frozenset[Generation] = frozenset()
        self._skipped = 0
        self._removals = Removals(ledger, config, run, record, durable)
        self._shared = SharedStorage(run, config.timeout_s, ledger.roster.driver, record)
        self.failures, self.problem = 0, ""

    def begin_group(self, generation: Generation | None, members: Iterable[Member]) -> None:
        """A group begins: steps count from what it restores, and its nodes have to have the same storage."""
        self._progress, self._restored = replace(self._progress, generation=generation), generation
        names = {member.node_id: self._ledger.roster.name(member) for member in members}
        handles = self._ledger.roster.among(names.values())
        self._shared.begin({node: handles[name] for node, name in names.items() if name in handles})

    # What is due.

    def look(self) -> frozenset[Generation]:
        """Begins to write the newest complete generation if it is due. Called before anything is freed.

        Returns:
            What is not to be freed now: it is about to be leased.
        """
        newest, now = self._ledger.books.newest(), time.monotonic()
        if newest is not None and (newest.restores, newest.step) in self._preempted:
            self._preempted.clear()
            self._wanted = "preemption"
        if newest is not None and persistence.is_due(self._config, newest, self._progress, now):
            self._progress = Progress(newest, now)
            self._wanted = self._wanted or "cadence"
        self._begin()
        return self._claimed

    def preempted(self, restores: int, step: int) -> None:
        """A snapshot is taken because nodes are going to be taken away."""
        if self._config.on_preemption:
            self._preempted.add((restores, step))

    def failed(self) -> None:
        """The worker group has failed."""
        if self._config.on_failure:
            self._flush("failure")

    @property
    def fatal(self) -> str:
        """What training is to fail with; "" while it goes on."""
        limit = self._config.fail_after
        return self.problem if limit is not None and self.failures >= limit else ""

    def _flush(self, why: str) -> None:
        """The newest complete generation is due, whatever the cadence says."""
        self._wanted = why
        self._begin()

    async def settle(self) -> str:
        """Writes what is due, the last complete generation of the run included. Returns what is not on storage."""
        # Storage that has failed for long may be well again, and nobody waits longer than he must.
        self._ending, self._not_before = True, 0.0
        await self._await_group()
        # What stores have reported last may still be under way.
        await self._ledger.pulse.ask_all(list(self._ledger.books.domains))
        if self._config.has_cadence:
            self._flush("end of the run")
        failures = self.failures
        while (self._writing is not None or self._wanted) and self.failures < failures + END_TRIES:
            self._begin()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_INTERVAL_S)
        await self._removals.settle(DISCARD_TIMEOUT_S)
        return self.problem

    async def _await_group(self) -> None:
        """A run may end before its stores have told this coordinator of themselves."""
        books, deadline = self._ledger.books, time.monotonic() + GRACE_S
        while not (books.group and books.group <= books.domains.keys()) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL_S / 5)
            books = self._ledger.books

    def _begin(self) -> None:
        if self._writing is not None or not self._wanted or time.monotonic() < self._not_before:
            return
        why, self._wanted = self._wanted, ""
        newest = self._ledger.books.newest()
        if newest is not None and newest not in self._stored.known:
            self._claimed = frozenset({newest})
            self._writing = asyncio.get_running_loop().create_task(self._persist(newest, why))

    # One checkpoint.

    async def _persist(self, generation: Generation, why: str) -> None:
        where, start = self._stored.new_path(generation), time.monotonic()
        # What earlier tries have left may be what storage has no room for.
        self._removals.begin()
        about = {"step": generation.step, "generation": str(generation), "path": where, "why": why}
        self._record("persisting", **about)
        try:
            written = await asyncio.wait_for(self._write(generation, where), self._config.timeout_s + GRACE_S)
            self.failures, self._skipped, self.problem, self._not_before = 0, 0, "", 0.0
            self._stored.known[generation] = written
            seconds = round(time.monotonic() - start, 3)
            metrics = encode(written.metrics)
            self._record("persisted", **about, seconds=seconds, metrics=metrics, num_bytes=written.num_bytes)
            self._prune()
        except GaveWayError as error:
            logger.warning("Step %d is not written to storage (%s): %s", generation.step, why, error)
            self._record("persist_skipped", **about, reason=str(error))
            self._skip(generation, where, why, error)
        except Exception as error:
            self._fail(generation, where, why, error)
        finally:
            self._writing, self._claimed = None, frozenset()
            self._changed.set()
        await self._ledger.notify()

    def _skip(self, generation: Generation, where: str, why: str, error: GaveWayError) -> None:
        """Cadence comes again by itself; what else is wanted does not, and what the group that failed keeps ends."""
        if self._ending:
            self._fail(generation, where, why, error)
        elif why != "cadence":
            self._skipped += 1
            self._later(why, self._skipped)

    def _later(self, why: str, times: int) -> float:
        """Has the newest complete generation written after a pause that grows with `times`; returns that."""
        pause = persistence.pause_s(times, ending=self._ending)
        self._wanted, self._not_before = self._wanted or why, time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause + 0.01, self._begin)
        return pause

    def _fail(self, generation: Generation, where: str, why: str, error: BaseException) -> None:
        """Notes it, and has it tried again later."""
        self.failures += 1
        said = "it took longer than PersistConfig.timeout_s" if isinstance(error, TimeoutError) else str(error)
        self.problem = f"step {generation.step} could not be written to {where} ({why}): {said}"
        pause = self._later(why, self.failures)
        text = "Training goes on, but %s. It is failure %d in a row; the next try is in %.0f s."
        logger.warning(text, self.problem, self.failures, pause)
        about = {"step": generation.step, "generation": str(generation), "path": where, "why": why}
        late = isinstance(error, TimeoutError)
        self._record("persist_failed", **about, failures=self.failures, error=said[:1000], timed_out=late)

    async def _write(self, generation: Generation, where: str) -> Persisted:
        await self._shared.demand()
        driver = self._ledger.roster.driver
        to = Destination.of(self._run, where, self._config.timeout_s, driver)
        located = await self._ledger.locate(generation)
        if located is None:
            raise GaveWayError("it was replaced before it could be leased")
        sources = sources_of(located)
        lease_id = f"upload {generation} {uuid.uuid4().hex[:8]}"
        hold = Lease(lease_id, generation, None, persists=not self._ending, driver=driver)
        holds = {name: replace(hold, source=name if source.own else None) for name, source in sources.items()}
        handles = self._ledger.roster.among(sources)
        try:
            await self._lease(holds, handles)
            self._claimed = frozenset()
            plan = await asyncio.to_thread(_plan, located, sources, self._run.name)
            return await self._fill(to, plan, holds, handles)
        finally:
            for handle in handles.values():
                handle.unlease.remote(lease_id)

    async def _lease(self, holds: Mapping[str, Lease], handles: Mapping[str, ActorHandle]) -> None:
        answers = await asyncio.gather(
            *(reply(handle.lease.remote(holds[name])) for name, handle in handles.items()), return_exceptions=True
        )
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed or handles.keys() != holds.keys():
            raise GaveWayError(str(failed[0]) if failed else "a store that holds it is gone")

    async def _fill(
        self, to: Destination, plan: DirectoryPlan, holds: Mapping[str, Lease], handles: Mapping[str, ActorHandle]
    ) -> Persisted:
        first, shared = handles[next(iter(holds))], ray.put(plan)
        try:
            writers = sorted({file.writer for file in plan.files})
            records = await self._upload(to, shared, writers, holds, handles)
            await reply(first.finish_upload.remote(to, shared, records, self._config.retries))
        except BaseException:
            first.discard_upload.remote(replace(to, timeout_s=DISCARD_TIMEOUT_S))
            # A store that hangs in a call of storage may leave more when that returns.
            self._removals.add(Removal(to.path, "discard_upload"))
            raise
        num_bytes = sum(record.size for record in records.values())
        return Persisted(plan.head.generation, plan.head.metrics.get(0, {}), to.path, num_bytes)

    async def _upload(
        self,
        to: Destination,
        plan: Any,
        writers: Sequence[int],
        holds: Mapping[str, Lease],
        handles: Mapping[str, ActorHandle],
    ) -> dict[str, FileRecord]:
        config, names = self._config, list(holds)
        pace = Pace(config.max_concurrent, config.retries, config.max_bandwidth_bytes_per_s)
        calls = [handles[names[n]].upload.remote(to, holds[names[n]], plan, n, pace) for n in writers]
        shares = [asyncio.ensure_future(reply(call)) for call in calls]
        try:
            found: list[Mapping[str, FileRecord]] = await asyncio.gather(*shares)
        except Exception:
            # The others stop when they hold nothing any more. What they write until then is to come before its removal.
            for name, handle in handles.items():
                handle.unlease.remote(holds[name].id)
            await asyncio.wait(shares, timeout=GRACE_S)
            raise
        return {path: record for share in found for path, record in share.items()}

    def _prune(self) -> None:
        known, attempt = self._stored.known.values(), self._ledger.books.attempt
        for one in persistence.superfluous(self._config, known, self._restored, attempt):
            del self._stored.known[one.generation]
            self._record("superfluous", step=one.generation.step, path=one.path)
            self._removals.add(Removal(one.path, "remove_checkpoint", one.generation.step))
        for where in self._stored.unfinished:
            self._removals.add(Removal(where, "clear_upload"))
        self._stored.unfinished = set()
        self._removals.begin()


@dataclass(frozen=True)
class Source:
    """What a store is to write.

    Attributes:
        parts: Of the generation.
        own: Whether it took them all from its own worker.
    """

    parts: frozenset[str]
    own: bool


def sources_of(located: Located) -> dict[str, Source]:
    """Which stores write a generation: those that took a part from their own worker, else the least burdened."""
    chosen: dict[str, set[str]] = {}
    for part, holders in sorted(located.holders.items()):
        own = [name for name in holders if part in located.stores[name].own]
        for name in own or [min(holders, key=lambda name: (len(chosen.get(name, ())), name))]:
            chosen.setdefault(name, set()).add(part)
    return {name: Source(frozenset(parts), parts <= located.stores[name].own) for name, parts in sorted(chosen.items())}


def _plan(located: Located, sources: Mapping[str, Source], run: str) -> DirectoryPlan:
    """Decodes, so it is not for the event loop. Writers are numbered in the order of the sources."""
    indices = [Index.from_bytes(raw) for raw in located.indices]
    holders: dict[str, list[int]] = {}
    for number, source in enumerate(sources.values()):
        for part in source.parts:
            holders.setdefault(part, []).append(number)
    about = About(run=run, step=located.generation.step, created_at_s=time.time())
    orbax = orbax_of(indices)
    if needs_database(indices):
        orbax = for_database(orbax)
    return plan_files(indices, orbax, about, holders=holders, num_writers=len(sources))
