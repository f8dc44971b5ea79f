"""Stub workers that are processes of their own, so that they can be killed and stopped: no Ray Train, no devices.

They call the package as a train function does, with states of numpy arrays, on real stores and a real coordinator.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from support import eventually

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Decision, Member, RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.model.books import Status
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Phase, Slot
from ray_jax_ckpt.start_hook import Wiring
from ray_jax_ckpt.system import process_alive, process_start_time
from ray_jax_ckpt.testing import LiveRun

CONFIG = SnapshotConfig(every_n_steps=1, copies=2, timeout_s=8, orphan_timeout_s=120)
ELEMENTS = 9_000_001  # two chunks of a transfer
WAIT_S = 60.0


def state_of(rank: int, step: int, extra: bool = False) -> dict[str, Any]:
    """Every rank's and every step's differs in every array. `extra`: the tree is larger by half."""
    w = np.arange(ELEMENTS, dtype=np.uint8) * np.uint8(2 * rank + 3) + np.uint8(step % 251)
    state = {"w": w, "m": {"v": np.full(999, rank + step / 7)}, "step": step, "name": "crew", "nothing": None}
    return state | {"extra": np.full(ELEMENTS // 2, step % 251, np.uint8)} if extra else state


class Worker:
    """One training process; a rank of one attempt after the other."""

    def ready(self) -> int:
        """Its process id, when everything is imported."""
        import jax

        import ray_jax_ckpt.worker  # noqa: F401  # imported before a test's time counts

        jax.devices()
        if not hasattr(self, "_said"):
            self._said: list[str] = []
            warnings.showwarning = lambda message, *_: self._said.append(str(message))
        return os.getpid()

    def begin(self, wiring: Wiring, decision: Decision, rank: int) -> None:
        """What the manager's start hook does."""
        from ray_jax_ckpt import session

        session._current = session.Session(wiring, decision, rank)

    def said(self) -> list[str]:
        """The warnings since the last time."""
        said, self._said[:] = [*self._said], []
        return said

    def snapshot(self, step: int, extra: bool = False, force: bool = False) -> bool:
        """Whether it was taken. The copying goes on in the background."""
        import ray_jax_ckpt as rjc
        from ray_jax_ckpt import session

        return rjc.snapshot(step, state_of(session.current().rank, step, extra), force=force) is not None

    def problem(self) -> str:
        """What waiting for the last snapshot says; "" if it becomes protected."""
        import ray_jax_ckpt as rjc

        try:
            rjc.wait()
        except Exception as error:
            return repr(error)
        return ""

    def snapshot_for_ever(self, step: int) -> None:
        """One after the other, whatever becomes of them."""
        while True:
            try:
                self.snapshot(step)
            except Exception:
                time.sleep(0.1)
            step += 1

    def restore(self, timeout_s: float, extra: bool = False) -> tuple[int, str]:
        """Restores what was decided, compares every bit; step and source."""
        import ray_jax_ckpt as rjc
        from ray_jax_ckpt import session
        from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
        from ray_jax_ckpt.testing import assert_identical

        current = session.current()
        located = current.decision.located
        assert located is not None, "nothing to restore"
        handle = SnapshotCheckpoint(located.generation)
        restored = rjc.restore(handle, state_of(99, 99, extra), timeout_s=timeout_s)
        assert_identical(restored.state, state_of(current.rank, handle.step, extra))
        return restored.step, restored.source


class Pool:
    """Worker processes that have started already: starting one takes seconds.

    Args:
        nodes: Where workers are wanted again and again. Elsewhere none is started ahead.
    """

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self._ready: dict[str, list[Any]] = {node: [] for node in nodes}

    def take(self, node_id: str) -> Any:
        """A worker on a node that is in no run; the next one begins to start."""
        ready = self._ready.get(node_id, [])
        worker = ready.pop() if ready else start_worker(node_id)
        if node_id in self._ready and not ready:
            ready.append(start_worker(node_id))
        return worker

    def give_back(self, node_id: str, worker: Any) -> None:
        """A worker is idle, and lives: it may be in another run."""
        if node_id in self._ready:
            self._ready[node_id].append(worker)
        else:
            ray.kill(worker)


def start_worker(node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor: Any = ray.remote(Worker).options(num_cpus=0, max_concurrency=4, scheduling_strategy=here)
    worker = actor.remote()
    worker.ready.remote()
    return worker


class Crew:
    """A run with one worker per node given, over many attempts. After each test it must be as good as new."""

    def __init__(self, run: str, nodes: list[tuple[str, str]], pool: Pool, config: SnapshotConfig = CONFIG) -> None:
        self.run, self.nodes, self.config, self._pool = run, nodes, config, pool
        self.workers: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        self.decision: Decision | None = None
        self.live = LiveRun(run)
        self.sound = False
        self._last_step = 0
        self._restored_in = 0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Such as a driver starts."""
        here = ray.get_runtime_context().get_node_id()
        self.coordinator = start_coordinator(RunIdentity(self.run, f"/nowhere/{self.run}", None), self.config, here)

    def stop_coordinator(self) -> None:
        """It is dead for good, as after a driver's death."""
        pid = self.live.coordinator()
        started = process_start_time(pid)
        ray.kill(self.coordinator)
        eventually(lambda: not process_alive(pid, started or 0))

    def eventually_held(self, rank: int, step: int, from_rank: int | None = None) -> None:
        """A store gets a step: anything of it, or what another rank's store has pushed."""

        def there() -> bool:
            held = [slot for slot in self.slots(rank) if slot.generation.step == step and slot.phase is Phase.HELD]
            source = None if from_rank is None else f":{self.nodes[from_rank][0][:16]}:"
            return any(source is None or source in slot.source for slot in held)

        eventually(there)

    @property
    def ranks(self) -> range:
        return range(len(self.nodes))

    @property
    def attempt(self) -> int:
        assert self.decision is not None
        return self.decision.attempt

    def steps(self) -> int:
        """The next step: they grow over all attempts."""
        self._last_step += 10
        return self._last_step

    def begin(self, fresh: Sequence[int] = ()) -> int | None:
        """A new attempt, as Ray Train makes one: dead workers, and those of `fresh`, are replaced.

        Returns the step that is restored.
        """
        for rank in self.ranks:
            if rank in fresh or not self._lives(rank):
                self.workers[rank] = self._pool.take(self.nodes[rank][0])
        members = tuple(Member(rank, node, ip, 0, node) for rank, (node, ip) in enumerate(self.nodes))
        self.decision = ray.get(self.coordinator.begin_attempt.remote(members), timeout=WAIT_S)
        wiring = Wiring(self.coordinator, self.config)
        ray.get([w.begin.remote(wiring, self.decision, rank) for rank, w in self.workers.items()], timeout=WAIT_S)
        self.pids = dict(enumerate(ray.get([self.workers[rank].ready.remote() for rank in self.ranks])))
        located = self.decision.located
        return located.generation.step if located else None

    def _lives(self, rank: int) -> bool:
        try:
            ray.get(self.workers[rank].ready.remote(), timeout=WAIT_S)
        except (KeyError, RayError):
            return False
        return True

    def skip_to(self, step: int) -> None:
        """Steps go on from this one."""
        self._last_step = step

    def snapshot(self, step: int, ranks: Sequence[int] | None = None, extra: Sequence[int] = ()) -> list[Any]:
        """All ranks snapshot a step; returns at once, with references to whether they took it."""
        asked = self.ranks if ranks is None else ranks
        return [self.workers[rank].snapshot.remote(step, rank in extra) for rank in asked]

    def problem(self, rank: int) -> str:
        """What a rank is told that waits for its last snapshot."""
        return ray.get(self.workers[rank].problem.remote(), timeout=WAIT_S)

    def generation(self, step: int) -> Generation:
        """A step of this attempt after a restore, or before any."""
        return Generation(self.attempt, 1 if self._restored_in == self.attempt else 0, step)

    def protect(self, step: int, timeout_s: float = WAIT_S, extra: Sequence[int] = ()) -> None:
        """A step is snapshotted by all ranks and becomes protected, in as many domains as asked for."""
        refs = [self.workers[rank].snapshot.remote(step, rank in extra) for rank in self.ranks]
        taken = ray.get(refs, timeout=WAIT_S)
        assert taken == [True] * len(self.nodes)
        wanted = min(self.config.copies, len(self.nodes))
        assert self.wait(step, timeout_s) == (wanted, self.config.copies)

    def recover(self) -> int:
        """Snapshots until one becomes protected, as a training does that goes on; its step."""
        deadline = time.monotonic() + WAIT_S
        while True:
            step = self.steps()
            try:
                self.protect(step, timeout_s=self.config.timeout_s)
            except (AssertionError, CheckpointError):
                assert time.monotonic() < deadline
                continue
            return step

    def wait(self, step: int, timeout_s: float = WAIT_S) -> tuple[int, int]:
        """Until a step of this attempt is protected: domains that it is in, and copies wanted."""
        ref = self.coordinator.wait.remote(self.generation(step), Status.PROTECTED, timeout_s)
        return ray.get(ref, timeout=timeout_s + 10)

    def restore(self, extra: Sequence[int] = ()) -> list[tuple[int, str]]:
        """All ranks restore, and each compares with what it had. Steps and sources by rank."""
        timeout_s = self.config.timeout_s
        refs = [self.workers[rank].restore.remote(timeout_s, rank in extra) for rank in self.ranks]
        found = ray.get(refs, timeout=WAIT_S)
        self._restored_in = self.attempt
        return found

    def latest(self) -> int | None:
        """Step of the newest complete generation."""
        generation = ray.get(self.coordinator.latest.remote(), timeout=WAIT_S)
        return None if generation is None else generation.step

    def store_pid(self, rank: int) -> int:
        return eventually(lambda: self.live.stores().get(rank))

    def slots(self, rank: int) -> list[Slot]:
        """The buffers of a rank's store that are in use."""
        return [slot for _, probe in self.live.probes(rank) for slot in probe.slots]

    def settle(self) -> None:
        """The newest generation is all that is left of this test."""
        eventually(lambda: not self.leftovers(), self.config.timeout_s + 20)
        # Twice two buffers per source: those of another size may not have been dropped yet.
        limit = 2 * 2 * min(self.config.copies, len(self.nodes)) * 1.1 * ELEMENTS
        for name, store in fleet.living_stores(self.run).items():
            held = ray.get(store.held_bytes.remote(), timeout=WAIT_S)
            assert held <= limit, f"store {name} holds {held} bytes"
        self.sound = True

    def leftovers(self) -> list[str]:
        """What the run holds beyond the newest generation's copies in two stores."""
        left = []
        handles = fleet.living_stores(self.run)
        if len(handles) != len(self.nodes):
            left.append(f"{len(handles)} stores")
        try:
            probes = {name: ray.get(handle.probe.remote(), timeout=WAIT_S) for name, handle in handles.items()}
        except RayError as error:  # dead, and not known to be so
            return [str(error)]
        newest = max((slot.generation for probe in probes.values() for slot in probe.slots), default=None)
        for name, probe in probes.items():
            left += [f"{name}: {slot}" for slot in probe.slots if slot.generation != newest or slot.phase != Phase.HELD]
            left += [f"{name}: {lease}" for lease in probe.leases]
        return left

    def close(self) -> None:
        """Ends the run, as the manager does after a run that ended well; nothing of it is left."""
        pids = list(self.live.stores().values())
        started = {pid: process_start_time(pid) for pid in pids}
        ray.get(self.coordinator.finish.remote(keep=False), timeout=WAIT_S)
        ray.kill(self.coordinator)
        eventually(lambda: not fleet.living_stores(self.run))
        eventually(lambda: not any(process_alive(pid, start) for pid, start in started.items() if start is not None))
        for rank in [rank for rank in self.ranks if self._lives(rank)]:
            self._pool.give_back(self.nodes[rank][0], self.workers.pop(rank))
        self.abort()

    def abort(self) -> None:
        """Ends everything at once."""
        ray.kill(self.coordinator)
        for actor in [*self.workers.values(), *fleet.living_stores(self.run).values()]:
            ray.kill(actor)
