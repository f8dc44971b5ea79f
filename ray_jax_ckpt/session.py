"""What a worker process knows of its attempt: set by the manager's start hook before the train function runs."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
import weakref
from typing import Any

import jax
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ray_jax_ckpt.arrays.plan import Plan, Planner, Topology, capture
from ray_jax_ckpt.arrays.tree import describe, flatten
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
from ray_jax_ckpt.data_state import DataCapture, DataRoom
from ray_jax_ckpt.environment import ENABLED, is_enabled
from ray_jax_ckpt.errors import (
    CheckpointError,
    MemoryLimitError,
    NoCheckpointError,
    NoSessionError,
    SnapshotError,
    SnapshotTimeoutError,
)
from ray_jax_ckpt.memory.announce import Listener
from ray_jax_ckpt.memory.messages import Decision, Survey
from ray_jax_ckpt.memory.tls import Tls, load_tls
from ray_jax_ckpt.model import attendance
from ray_jax_ckpt.model.announce import Position
from ray_jax_ckpt.model.attendance import Began
from ray_jax_ckpt.model.index import Layout
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.model.steps import checked_step
from ray_jax_ckpt.need import Need
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.persisting import StorageSide
from ray_jax_ckpt.pipeline import GRACE_S, Job, Pipeline
from ray_jax_ckpt.share import Share
from ray_jax_ckpt.start_hook import Wiring

logger = logging.getLogger(__name__)


class Session:
    """One worker's part in one attempt. Its methods are called from the training thread, `snapshot` from any."""

    def __init__(self, wiring: Wiring, decision: Decision, rank: int) -> None:
        self.coordinator, self.config, self.decision, self.rank = wiring.coordinator, wiring.config, decision, rank
        self.storage = StorageSide(wiring.persist, self.coordinator, self.ask)
        if rank == 0:
            self.storage.prepare()
        self.restores = 0
        # Path of what `get_checkpoint()` gives.
        self.offered = decision.stored.path if decision.stored is not None else ""
        faults.identify(rank)
        self.committed_any = False
        self._handle: SnapshotCheckpoint | None = None
        self._leased: Generation | None = None
        self._last_step: int | None = None
        self._planner: Planner | None = None
        self._checked: tuple[Plan, int] | None = None
        self._room = DataRoom()
        self._told: Began | None = None
        self._looked = False
        # One call at a time, whatever threads they come from: the next one may count on the last one's submitted job.
        self._calls = threading.Lock()
        self._listener = Listener(self.coordinator, decision.attempt, rank, decision.leaving, self._missed)
        self._ranks: dict[int, int] | None = None
        self._pipeline = Pipeline(
            decision.stores[rank],
            lambda: self.ask(self.coordinator.replace_store.remote(rank, decision.attempt)),
            self._room,
            attempt=decision.attempt,
            where=self._where,
            verify=wiring.config.verify,
            reject_nonfinite=wiring.config.reject_nonfinite,
            timeout_s=wiring.config.timeout_s,
            failed=self._abandon,
            began=self._tell,
        )

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.decision.members)

    @property
    def _where(self) -> str:
        return f"rank {self.rank} on node {self.node_id}"

    @property
    def node_id(self) -> str:
        """Ray's id of this worker's node."""
        return self.decision.members[self.rank].node_id

    @functools.cached_property
    def tls(self) -> Tls | None:
        """Certificates for reading from other nodes. Raises ConfigError if those that were set cannot work here."""
        config = self.config.tls
        return load_tls(config, self.decision.members[self.rank].node_ip) if config is not None else None

    # Snapshots.

    def snapshot(
        self, step: int, state: Any, data: Any, metrics: dict[str, Any], force: bool, timeout_s: float
    ) -> SnapshotCheckpoint | None:
        """See `ray_jax_ckpt.snapshot`."""
        with self._calls:
            return self._snapshot(checked_step(step, self._last_step), state, data, metrics, force, timeout_s)

    def _snapshot(
        self, step: int, state: Any, data: Any, metrics: dict[str, Any], force: bool, timeout_s: float
    ) -> SnapshotCheckpoint | None:
        self.storage.check()
        announced = self._listener.arrive((self.restores, step))
        if self._handle is not None and step == self._handle.step:
            return self._again(self._handle, metrics, force, timeout_s)
        if not self._looked:
            self._look(state)
        if not force and not announced and step % self.config.every_n_steps != 0:
            return None
        generation = Generation(self.decision.attempt, self.restores, step)
        flat = flatten(state)
        planner = self._ready_planner(generation, force, timeout_s)
        if planner is None:
            return None
        plan = planner.plan(flat, self.storage.describer(force))
        data_state = DataCapture(data, self.config.max_data_bytes)
        try:
            if not self._has_memory(generation, plan, data_state.num_bytes, force):
                return None
            if not self._make_way(generation, force, announced, timeout_s):
                return None
            handle = self.handle(generation, metrics)
            faults.reach("capture", step)
            job = Job(generation, capture(plan, flat), data_state, handle.metrics)
            if force:
                # Last, so that whatever else fails before leaves no reserved buffer behind.
                self._reserve(job, timeout_s)
                self._keep(handle)
            self._pipeline.submit(job)
            data_state = None
        finally:
            if data_state is not None:
                data_state.discard()
        self.committed_any, self._last_step, self._handle = True, step, handle
        return handle

    def handle(self, generation: Generation, metrics: dict[str, Any] | None = None) -> SnapshotCheckpoint:
        """What stands for a generation in this process."""
        files = (Share(self, generation, whole=whole) for whole in (False, True))
        return SnapshotCheckpoint(generation, metrics, share=next(files), whole=next(files))

    def survey(self, generation: Generation) -> Survey:
        """Where a generation is, when it is complete. Any thread may call it.

        Raises:
            SnapshotError: It does not become complete.
            SnapshotLostError: It is not held any more.
        """
        if generation == self.latest_generation:
            self.drain(self.config.timeout_s)
        return self.ask(self.coordinator.survey.remote(generation, self.config.timeout_s))

    def _look(self, state: Any) -> None:
        """At the first call, due or not: what cannot work is said now, not when the first snapshot is due."""
        flat = flatten(state)
        for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True):
            describe(*leaf)
        if jax.process_count() == 1:
            self._planner = self._new_planner(0)
            self._check_memory(self._planner.plan(flat, self.storage.describer(False)), 0)
        self._warn_at_first()
        self._looked = True

    def _warn_at_first(self) -> None:
        """Of what is seldom meant."""
        found = self.decision.located or self.decision.stored
        if found is not None and not self.restores and self.rank == 0:
            logger.warning(
                "Step %d of this run could be restored, and the train function snapshots without having called "
                "restore(): training starts over, and its snapshots replace that step. Begin with "
                "`if (checkpoint := ray.train.get_checkpoint()) is not None: "
                "restored = ray_jax_ckpt.restore(checkpoint, ...)`. To start over on purpose use another run name.",
                found.generation.step,
            )
        if self.world_size > jax.process_count() == 1 and self.rank == 0:
            logger.warning(
                "%d workers, and JAX knows of one process: each trains for itself, with a state of its own. To train "
                "together give JaxTrainer(jax_config=ray_jax_ckpt.JaxConfig()).",
                self.world_size,
            )

    def _again(
        self, handle: SnapshotCheckpoint, metrics: dict[str, Any], force: bool, timeout_s: float
    ) -> SnapshotCheckpoint:
        """The step that was snapshotted last, once more: now with a lease, if it is to be kept."""
        handle.metrics.update(metrics)
        if force and not self._kept(handle):
            self.drain(timeout_s)
            self._pipeline.lease(Lease.of_handle(handle.generation), timeout_s)
            self._keep(handle)
        return handle

    def _reserve(self, job: Job, timeout_s: float) -> None:
        try:
            self._pipeline.reserve(job, Lease.of_handle(job.generation), timeout_s)
        except CheckpointError as error:
            self._abandon(job.generation, f"rank {self.rank} had no buffer for it")
            raise error if isinstance(error, SnapshotError) else SnapshotError(str(error)) from error

    def _keep(self, handle: SnapshotCheckpoint) -> None:
        """The lease that was taken for a handle ends when the handle is collected."""
        self._leased = handle.generation
        end = weakref.finalize(handle, self._pipeline.unlease, Lease.of_handle(handle.generation).id)
        # It ends with the attempt anyway, and there may be no cluster to talk to when the process exits.
        end.atexit = False

    def _kept(self, handle: SnapshotCheckpoint) -> bool:
        return self._leased == handle.generation

    @property
    def latest_generation(self) -> Generation | None:
        """The last one that this rank took."""
        return self._handle.generation if self._handle is not None else None

    def restored(self, step: int | None) -> None:
        """A new line of steps begins at a restored one; None: it is not known which that was."""
        self.restores += 1
        self._last_step, self._handle = step, None

    def drain(self, timeout_s: float) -> None:
        """Waits until this rank's last snapshot is stored; raises what went wrong."""
        self._pipeline.drain(timeout_s)

    def _new_planner(self, timeout_s: float) -> Planner:
        return Planner(self._topology(timeout_s), on_device=self.config.staging == "device")

    def _ready_planner(self, generation: Generation, force: bool, timeout_s: float) -> Planner | None:
        """The planner; None (with a warning) if the group could not be asked how JAX numbers it: training goes on."""
        if self._planner is None or self._planner.leaving != self._listener.leaving:
            try:
                self._planner = self._new_planner(timeout_s)
            except SnapshotError as error:
                if force:
                    self._abandon(generation, f"rank {self.rank} does not know how JAX numbers the processes")
                    raise
                self._skip(generation, f"rank {self.rank} does not know how JAX numbers the processes: {error}")
        return self._planner

    def _topology(self, timeout_s: float) -> Topology:
        """The group as JAX numbers it.

        Asked at the first snapshot: earlier it would start JAX before the user set it up.
        """
        if self.tls is not None:
            # Said here if it cannot work, where the user sees it; a store could say it to its log only.
            logger.info("Snapshots travel with TLS.")
        domains = tuple(member.domain for member in self.decision.members)
        if self._ranks is None and jax.process_count() > 1:
            arguments = (self.decision.attempt, self.rank, jax.process_index(), timeout_s)
            # Once: all ranks meet for it, and some may be gone when they are placed anew.
            self._ranks = self.ask(self.coordinator.number_processes.remote(*arguments), timeout_s)
        return Topology(self.rank, domains, self.config.copies, self._ranks or {}, self._listener.leaving)

    def _make_way(self, generation: Generation, force: bool, announced: bool, timeout_s: float) -> bool:
        """Waits for the previous snapshot, or skips this one. False: skipped."""
        if self._pipeline.idle(0):
            return True
        if self.config.on_busy == "skip" and not (force or announced or self._must_wait()):
            self._skip(generation, f"{self._where} was still storing an earlier step, and on_busy is 'skip'")
            return False
        if self._pipeline.idle(timeout_s):
            return True
        text = (
            f"{self._where} was still storing an earlier step after {timeout_s:g} s; raise SnapshotConfig.timeout_s, "
            "or snapshot less often"
        )
        if force:
            self._abandon(generation, text)
            raise SnapshotTimeoutError(f"Snapshot of step {generation.step}: {text}.")
        self._skip(generation, text)
        return False

    def _skip(self, generation: Generation, why: str) -> None:
        """A snapshot that was due is not taken; training goes on."""
        self._abandon(generation, why)
        warnings.warn(f"Snapshot of step {generation.step} skipped: {why}.", RuntimeWarning, stacklevel=6)

    def _must_wait(self) -> bool:
        try:
            return self.ask(self.coordinator.must_wait.remote())
        except CheckpointError:
            return True

    def _tell(self, generation: Generation, layout: Layout) -> None:
        """Tells the coordinator, in the background, what this rank snapshots: it compares the ranks."""
        last, leaves = self._told, ()
        if last is None or last.structure != layout.structure:
            leaves = attendance.describe(layout.leaves, layout.local)
        previous = None if last is None else last.generation
        self._told = Began(self.rank, generation, previous, layout.structure, leaves)
        self.coordinator.began.remote(self._told)

    def _missed(self, position: Position) -> None:
        """The others took an announced snapshot that this rank did not hear of in time."""
        generation = Generation(self.decision.attempt, *position)
        self._abandon(generation, f"rank {self.rank} was not told in time that it was announced")

    def _abandon(self, generation: Generation, reason: str) -> None:
        self.coordinator.abandon.remote(generation, reason)

    def _has_memory(self, generation: Generation, plan: Plan, data_bytes: int, force: bool) -> bool:
        """Whether the node has the memory for a snapshot. False: skipped.

        The first one of an attempt shows whether the settings can work, and raises. What has grown since, or finds less
        memory than there was, must not cost the training.
        """
        try:
            self._check_memory(plan, data_bytes)
        except MemoryLimitError as error:
            if self._checked is None:
                raise
            if force:
                self._abandon(generation, f"{self._where} has not enough memory")
                raise
            self._skip(generation, f"{self._where} has not enough memory. {str(error).removesuffix('.')}")
            return False
        return True

    def _check_memory(self, plan: Plan, data_bytes: int) -> None:
        """What all stores on this node will hold, compared with what it may take. Once per tree structure."""
        self._room.grow(data_bytes)
        if self._checked == (plan, self._room.num_bytes):
            return
        members, config = self.decision.members, self.config
        ranks = [member.rank for member in members if member.node_id == self.node_id]
        need = Need.of(plan, ranks, members, self._room.num_bytes, config.copies, self.storage.persists)
        if self.rank == ranks[0]:
            logger.info("%s.", need)
        need.check(config, sum(self._held_bytes(rank) for rank in ranks))
        self._checked = plan, self._room.num_bytes

    def _held_bytes(self, rank: int) -> int:
        try:
            return self.ask(self.decision.stores[rank].held_bytes.remote())
        except CheckpointError:
            return 0

    # Calls.

    def ask(self, ref: Any, timeout_s: float | None = None) -> Any:
        """The answer of an actor.

        Raises:
            CheckpointError: What the actor raised.
            SnapshotError: It did not answer in time, or is gone.
        """
        timeout_s = (timeout_s or self.config.timeout_s) + GRACE_S
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, CheckpointError) else SnapshotError(str(error))) from None
        except GetTimeoutError:
            raise SnapshotTimeoutError(
                f"The run's coordinator or store did not answer within {timeout_s:g} s; raise SnapshotConfig.timeout_s "
                "if it is only slow."
            ) from None
        except RayError as error:
            raise SnapshotError(f"The run's coordinator or store cannot be reached: {error}") from error

    def record(self, event: str, **fields: Any) -> None:
        """Adds an event to the run's log; returns at once."""
        self.coordinator.record.remote(event, time.time(), {"rank": self.rank, **fields})


class _Off:
    """A run without snapshots."""


OFF = _Off()
_current: Session | Wiring | _Off | None = None


def become(what: Session | Wiring | _Off) -> Session | Wiring | _Off | None:
    """What this worker is from now on; returns what it was. Before the train function only."""
    global _current
    before, _current = _current, what
    return before


def peek() -> Session | Wiring | _Off | None:
    """What this worker is."""
    return _current


def is_off() -> bool:
    """Whether the calls are to do nothing: `RAY_JAX_CKPT_ENABLED=0` for the run's driver, or for this process."""
    return _current is OFF or (_current is None and not is_enabled())


def current_or_none() -> Session | None:
    """This worker's session; None in a process that is no worker of a run with a `CheckpointManager`.

    Raises:
        NoSessionError: It is one, and does not know yet what its attempt restores.
    """
    return None if _current is None or is_off() else current()


def current() -> Session:
    """This worker's session.

    Raises:
        NoSessionError: There is none; the message says what to do.
    """
    if isinstance(_current, Session):
        return _current
    if isinstance(_current, Wiring):
        if _current.problem:
            raise NoCheckpointError(_current.problem)
        raise NoSessionError(
            "This attempt's restore decision has not arrived, so snapshots cannot be numbered. Failing the "
            "attempt; the manager's log says why."
        )
    if is_off():
        raise NoSessionError(f"{ENABLED}=0: this run has no snapshots.")
    raise NoSessionError(
        "Not in the train function of a run with a CheckpointManager. Call this inside the function that "
        "JaxTrainer runs, with at least one worker (num_workers=0 runs without a controller), and add "
        "RunConfig(callbacks=[ray_jax_ckpt.CheckpointManager()])."
    )
