"""Has the stores write snapshots to storage as they become due, and keeps the list of what is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.errors import CheckpointError, PersistError, SnapshotLostError, StoreError
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.memory.messages import Located, RunIdentity
from ray_jax_ckpt.memory.shared_storage import SharedStorage
from ray_jax_ckpt.memory.stored import Stored
from ray_jax_ckpt.memory.uploads import Destination, Pace
from ray_jax_ckpt.model import persistence
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.persistence import Persisted, Progress
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.storage.manifest import FileRecord
from ray_jax_ckpt.storage.plan import About, DirectoryPlan, for_database, needs_database, orbax_of, plan_files

logger = logging.getLogger(__name__)

GRACE_S = 10.0
END_TRIES = 2
LOOK_INTERVAL_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
DISCARD_TIMEOUT_S = 30.0


class GaveWayError(StoreError):
    """An upload that was not begun, or was given up, for the sake of snapshots."""


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
    ) -> None:
        self._ledger, self._config, self._run, self._stored, self._record = ledger, config, run, stored, record
        self._preempted: set[tuple[int, int]] = set()
        self._progress = Progress(None, time.monotonic())
        self._wanted = ""
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._ending = False
        self._changed = asyncio.Event()
        self._claimed: frozenset[Generation] = frozenset()
        self._shared = SharedStorage(run, config.timeout_s, _answer)
        # What writers that died have left is looked for once, and after failures.
        self._untidy = True
        self.failures, self.problem = 0, ""

    def restored(self, generation: Generation | None) -> None:
        """A group begins: steps count from what it restores."""
        self._progress = replace(self._progress, generation=generation)

    async def check_storage(self, stores: Mapping[str, ActorHandle]) -> None:
        """Says at the start of a group if its stores would write to different places. Never raises."""
        try:
            await self._shared.check(stores)
        except (CheckpointError, TimeoutError) as error:
            said = str(error) or "storage did not answer"
            logger.warning("Checkpoints will not reach storage as it is now: %s", said)
            self._record("storage_unfit", error=said[:1000])

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
        self._ending = True
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
        return self.problem

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
        where, start = self._stored.path(generation), time.monotonic()
        try:
            written = await asyncio.wait_for(self._write(generation, where), self._config.timeout_s + GRACE_S)
            self.failures, self.problem, self._not_before = 0, "", 0.0
            self._stored.known[generation] = written
            seconds = round(time.monotonic() - start, 3)
            self._record("persisted", step=generation.step, path=where, why=why, seconds=seconds)
            self._prune()
            self._tidy(generation)
        except GaveWayError as error:
            logger.warning("Step %d is not written to storage (%s): %s", generation.step, why, error)
            self._record("persist_skipped", step=generation.step, why=why, reason=str(error))
        except Exception as error:
            self._fail(generation, where, why, error)
        finally:
            self._writing, self._claimed = None, frozenset()
            self._changed.set()
        await self._ledger.notify()

    def _fail(self, generation: Generation, where: str, why: str, error: BaseException) -> None:
        """Notes it, and has the newest complete generation written after a pause that grows."""
        self.failures += 1
        self._untidy = True
        said = "it took longer than PersistConfig.timeout_s" if isinstance(error, TimeoutError) else str(error)
        self.problem = f"step {generation.step} could not be written to {where} ({why}): {said}"
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.failures - 1))
        self._wanted, self._not_before = self._wanted or why, time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause + 0.01, self._begin)
        text = "Training goes on, but %s. It is failure %d in a row; the next try is in %.0f s."
        logger.warning(text, self.problem, self.failures, pause)
        self._record("persist_failed", step=generation.step, why=why, failures=self.failures, error=said[:1000])

    async def _write(self, generation: Generation, where: str) -> Persisted:
        to = Destination(self._run.filesystem, where, self._run.rebuild, self._config.timeout_s)
        located = await self._ledger.locate(generation)
        if located is None:
            raise GaveWayError("it was replaced before it could be leased")
        sources = sources_of(located)
        lease_id = f"upload {generation} {uuid.uuid4().hex[:8]}"
        holds = {
            name: Lease(lease_id, generation, None, source=name if source.own else None, persists=not self._ending)
            for name, source in sources.items()
        }
        handles = self._ledger.roster.among(sources)
        try:
            await self._lease(holds, handles)
            self._shared.demand()
            self._claimed = frozenset()
            plan = await asyncio.to_thread(_plan, located, sources, self._run.name)
            return await self._fill(to, plan, holds, handles)
        finally:
            for handle in handles.values():
                handle.unlease.remote(lease_id)

    async def _lease(self, holds: Mapping[str, Lease], handles: Mapping[str, ActorHandle]) -> None:
        answers = await asyncio.gather(
            *(_answer(handle.lease.remote(holds[name])) for name, handle in handles.items()), return_exceptions=True
        )
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed or handles.keys() != holds.keys():
            raise GaveWayError(str(failed[0]) if failed else "a store that holds it is gone")

    async def _fill(
        self, to: Destination, plan: DirectoryPlan, holds: Mapping[str, Lease], handles: Mapping[str, ActorHandle]
    ) -> Persisted:
        names = list(holds)
        config = self._config
        pace = Pace(config.max_concurrent, config.retries, config.max_bandwidth_bytes_per_s)
        first, shared = handles[names[0]], ray.put(plan)
        await _answer(first.prepare_upload.remote(to))
        try:
            writers = sorted({file.writer for file in plan.files})
            shares = [_answer(handles[names[n]].upload.remote(to, holds[names[n]], shared, n, pace)) for n in writers]
            found: list[Mapping[str, FileRecord]] = await asyncio.gather(*shares)
            records = {path: record for share in found for path, record in share.items()}
            await _answer(first.finish_upload.remote(to, shared, records, config.retries))
        except BaseException:
            first.discard_upload.remote(replace(to, timeout_s=DISCARD_TIMEOUT_S))
            raise
        return Persisted(plan.head.generation, plan.head.metrics.get(0, {}))

    # Removing.

    def _prune(self) -> None:
        for one in persistence.superfluous(self._config, self._stored.known.values()):
            del self._stored.known[one.generation]
            self._ledger.spawn(self._remove(one))

    async def _remove(self, one: Persisted) -> None:
        generation = one.generation
        where = self._stored.path(generation)
        to = Destination(self._run.filesystem, where, self._run.rebuild, self._config.timeout_s)
        said = "no store lives"
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            handle: Any = next(iter(self._ledger.roster.handles.values()), None)
            try:
                if handle is not None:
                    await asyncio.wait_for(_answer(handle.remove_checkpoint.remote(to)), to.timeout_s + GRACE_S)
                    self._record("checkpoint_removed", step=generation.step, path=where)
                    return
            except Exception as error:
                said = str(error)
                logger.warning("Checkpoint %s could not be removed: %s", where, said)
        logger.warning("Checkpoint %s is superfluous and stays for now: it goes with the next one that does.", where)
        self._record("remove_failed", step=generation.step, path=where, error=said[:1000])
        self._untidy = True
        self._stored.known[generation] = one

    def _tidy(self, newest: Generation) -> None:
        """Has what is unfinished and older than a checkpoint that is complete removed, in the background."""
        if self._untidy:
            self._untidy = False
            self._ledger.spawn(self._sweep(newest))

    async def _sweep(self, newest: Generation) -> None:
        to = Destination(self._run.filesystem, self._run.path, self._run.rebuild, self._config.timeout_s)
        handle: Any = next(iter(self._ledger.roster.handles.values()), None)
        try:
            removed = await _answer(handle.sweep_checkpoints.remote(to, newest)) if handle is not None else []
        except CheckpointError as error:
            self._untidy = True
            logger.warning("What is unfinished on storage could not be removed, trying again later: %s", error)
            return
        for path in removed:
            self._record("unfinished_removed", path=path)


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


async def _answer(ref: Any) -> Any:
    """A store's answer, or what it raised as an error of this package."""
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SnapshotLostError):
            raise GaveWayError(str(cause)) from None
        raise (cause if isinstance(cause, CheckpointError) else PersistError(str(error))) from None
    except RayError as error:
        raise PersistError(f"a store that was writing is gone: {error}") from error
