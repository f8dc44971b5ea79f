"""The training run that measures snapshots, restores and memory: two workers of two CPU devices, on two nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import Machines, fit
from bench.samples import Samples, merged

NUM_WORKERS = 2
DEVICES_PER_WORKER = 2
WAIT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        name: Of the run.
        workload: "W1" (GPT-2 with Adam, `gb` large), "W2" (5,000 vectors of 1 KiB), "W3" (16 matrices of 4 MiB).
        gb: Size of W1.
        copies: As in `SnapshotConfig`.
        parts: Names of `Bench`'s methods, in the order in which they are to run.
        repeats: Of everything but loops.
        staging: As in `SnapshotConfig`.
        step_s: Duration of a train step.
        loop_steps: Steps of a loop.
        loop_repeats: How often each loop runs.
    """

    name: str
    workload: str
    gb: float
    copies: int
    parts: tuple[str, ...]
    repeats: int
    staging: Any = "host"
    step_s: float = 0.15
    loop_steps: int = 15
    loop_repeats: int = 2


def run(plan: Plan, machines: Machines) -> dict[str, Any]:
    """Trains once. Returns the series of seconds (of the slower rank), and facts.

    Raises:
        Exception: What the train function raised.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    import ray_jax_ckpt as rjc

    work = machines.work / plan.name
    work.mkdir()
    config = rjc.SnapshotConfig(every_n_steps=1, copies=plan.copies, staging=plan.staging)
    trainer = JaxTrainer(
        train_fn,
        train_loop_config={"plan": dataclasses.asdict(plan), "work": str(work), "raylets": list(machines.raylets)},
        jax_config=rjc.JaxConfig(),
        scaling_config=ScalingConfig(
            num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(work),
            callbacks=[rjc.CheckpointManager(snapshot=config)],
            worker_runtime_env={"env_vars": worker_environment(machines.work)},
        ),
    )
    fit(trainer)
    series, facts = merged([work / f"rank{rank}.json" for rank in range(NUM_WORKERS)])
    return {"series": series, "facts": facts}


def worker_environment(work: Path) -> dict[str, str]:
    """CPU devices, and a compilation cache of the benchmark's own."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES_PER_WORKER}",
        "XDG_CACHE_HOME": str(work / "cache"),
    }


def train_fn(config: dict[str, Any]) -> None:
    """Measures, on one of the workers."""
    plan = Plan(**{name: tuple(v) if isinstance(v, list) else v for name, v in config["plan"].items()})
    bench = Bench(plan, Path(config["work"]), config["raylets"])
    bench.first_snapshot()
    bench.snapshots()
    for part in plan.parts:
        getattr(bench, part)()
    bench.samples.save(Path(config["work"]) / f"rank{bench.rank}.json")
    bench.barrier()


class Bench:
    """One rank. All ranks call the same methods in the same order."""

    def __init__(self, plan: Plan, work: Path, raylets: list[int]) -> None:
        import jax
        import ray.train
        from jax.experimental import multihost_utils

        from bench import workload
        from ray_jax_ckpt import session

        self.plan, self.work, self._raylets = plan, work, raylets
        self.samples = Samples()
        self.rank = ray.train.get_context().get_world_rank()
        self._session: Any = session.current()
        self._barriers = itertools.count()
        self._peer: Any = None
        self._sync = multihost_utils.sync_global_devices
        self._workload = workload
        mesh = workload.make_mesh()
        self.step_function = workload.Step(mesh)
        shapes = workload.SHAPES[plan.workload](plan.gb)
        self.state: Any = workload.make_state(mesh, shapes, "pmv" if plan.workload == "W1" else "p")
        self.abstract, self.number, self.handle = workload.abstract(self.state), 0, None
        self.num_bytes = workload.num_bytes(self.state)
        self.samples.facts |= {"state_bytes": self.num_bytes, "num_leaves": len(jax.tree.leaves(self.state))}
        if self.has_steps:
            self._calibrate(multihost_utils.broadcast_one_to_all)

    def _calibrate(self, broadcast: Any) -> None:
        import numpy as np

        agree = lambda number: int(broadcast(np.int32(number)))  # noqa: E731
        self.state = self.step_function.calibrate(self.state, self.plan.step_s, agree)
        self.samples.facts["num_products"] = self.step_function.num_products

    @property
    def has_steps(self) -> bool:
        """Whether the state is trained, not only counted on: a step on thousands of leaves would measure XLA."""
        return self.plan.workload != "W2"

    @property
    def own_bytes(self) -> int:
        """This rank's share of the state."""
        return self.num_bytes // NUM_WORKERS

    def barrier(self) -> None:
        """All ranks leave it at about the same time."""
        self._sync(f"bench {next(self._barriers)}")

    def step(self) -> None:
        """One train step."""
        self.number += 1
        if self.has_steps:
            self.state = self.step_function(self.state, self.number)

    # Snapshots.

    def first_snapshot(self) -> None:
        """The one that plans, makes buffers and maps them."""
        self.step()
        self._note_memory("idle")
        self._one_snapshot("first ")

    def snapshots(self) -> None:
        """Single ones, each until it is protected."""
        # After the first one programs are compiled in the background: seconds on a busy machine.
        self._await_staging()
        for _ in range(3):
            self._one_snapshot("warm-up ")
        for _ in range(self.plan.repeats):
            self._one_snapshot("")
        self._note_memory("steady")

    def _await_staging(self) -> None:
        staging = self._session._planner._plan.staging
        deadline = time.monotonic() + WAIT_S
        while staging.is_wanted and not staging.is_ready and time.monotonic() < deadline:
            time.sleep(0.05)
        self.samples.facts["staging ready"] = staging.is_ready

    def snapshot_phases(self) -> None:
        """Some more, with the package's own steps timed."""
        from bench.phases import SNAPSHOT, timed_phases

        with timed_phases(self.samples, SNAPSHOT):
            for _ in range(self.plan.repeats):
                self._one_snapshot("phased ")

    def _one_snapshot(self, prefix: str) -> None:
        import ray_jax_ckpt as rjc
        from ray_jax_ckpt.model.books import Status

        self.step()
        self.barrier()
        start = time.perf_counter()
        self.handle = rjc.snapshot(self.number, self.state)
        self._since(start, f"{prefix}call")
        coordinator, generation = self._session.coordinator, self._session.latest_generation

        def reaches(status: Status) -> None:
            self._session.ask(coordinator.wait.remote(generation, status, WAIT_S), WAIT_S)
            self._since(start, f"{prefix}{status}")

        def idle() -> None:
            self._session.drain(WAIT_S)
            self._since(start, f"{prefix}ready for the next")

        with ThreadPoolExecutor(3) as threads:
            waits = [threads.submit(reaches, status) for status in (Status.COMPLETE, Status.PROTECTED)]
            for wait in (*waits, threads.submit(idle)):
                wait.result()

    def _since(self, start: float, name: str) -> None:
        self.samples.series[name].append(time.perf_counter() - start)

    def loops(self) -> None:
        """The same steps without snapshots, with one after every step, and after every fifth."""
        import ray_jax_ckpt as rjc

        def snapshot() -> None:
            self.handle = rjc.snapshot(self.number, self.state)

        for _ in range(self.plan.loop_repeats):
            for every, name in ((0, "none"), (1, "every step"), (5, "every 5 steps"), (0, "none")):
                with self.loop(f"loop {name}"):
                    self.steps(every, snapshot)
                rjc.wait(WAIT_S)

    @contextlib.contextmanager
    def loop(self, name: str) -> Iterator[None]:
        self.barrier()
        start = time.perf_counter()
        yield
        self.samples.series[name].append((time.perf_counter() - start) / self.plan.loop_steps)

    def steps(self, every: int, snapshot: Any) -> None:
        for i in range(1, self.plan.loop_steps + 1):
            self.step()
            if every and i % every == 0:
                snapshot()

    # Restores.

    def restore(self) -> None:
        """From the own node's store, as after the death of a worker, but in a process that is warm."""
        self._restores("restore local", "memory:local")

    def peer(self) -> None:
        """Every byte over Flight, as after the death of a node: ranks believe to be on a third node."""
        self._socket_rates("socket, both ranks", active=True)
        self._one_stream()
        with self._displaced():
            self._restores("restore peer", "memory:peer")

    def _restores(self, name: str, source: str) -> None:
        """The last snapshot, several times. The old state is given up first: after a failure there is none."""
        self.state = None
        for repeat in range(self.plan.repeats + 1):
            self._restore(f"first {name}" if repeat == 0 else name, source)

    def _restore(self, name: str, source: str) -> None:
        import ray_jax_ckpt as rjc

        assert self.handle is not None
        self.state = None
        self.barrier()
        with self.samples.timed(name):
            restored = rjc.restore(self.handle, self.abstract)
        self.state, self.number = restored.state, restored.step
        # With one copy each replicated leaf is in one store only, and the other ranks read it there.
        if restored.source != source and self.plan.copies > 1:
            raise RuntimeError(f"restored from {restored.source}, not from {source}")
        if self.has_steps and self._workload.saved_step(self.state) != self.number:
            raise RuntimeError(f"restored another state than that of step {self.number}")

    @contextlib.contextmanager
    def _displaced(self) -> Iterator[None]:
        from ray_jax_ckpt.session import Session

        original = Session.node_id
        Session.node_id = property(lambda _: "a node without stores")  # pyright: ignore
        try:
            yield
        finally:
            Session.node_id = original  # pyright: ignore

    def _one_stream(self) -> None:
        """Rank 0 alone reads what a single store holds, through the package's reader and through a bare socket."""
        assert self.handle is not None
        attempt = self._session.decision.attempt
        located = self._session.ask(
            self._session.coordinator.locate.remote(self.handle.generation, self.rank, attempt), WAIT_S
        )
        self.barrier()
        for _ in range(self.plan.repeats if self.rank == 0 else 0):
            self._read_stream(located)
        self.barrier()
        self._socket_rates("socket, one stream", active=self.rank == 0)

    def _read_stream(self, located: Any) -> None:
        import numpy as np

        from ray_jax_ckpt.memory.reader import Reader
        from ray_jax_ckpt.model.index import Index
        from ray_jax_ckpt.model.recovery import Stored, Want

        index = Index.from_bytes(located.indices[0])
        part = max(index.layout.parts, key=lambda p: p.num_bytes)
        only = dataclasses.replace(located, holders={part.id: located.holders[part.id][:1]})
        wants = [Want(i.box, [Stored(part.id, i, "")], 4) for i in part.items]
        secret, config = self._session.decision.secret, self._session.config
        reader = Reader(only, "elsewhere", secret, verify=config.verify, timeout_s=WAIT_S)
        with reader, self.samples.timed("flight, one stream"):
            reader.fetch(wants, [np.dtype(np.float32)] * len(wants))
        self.samples.facts["stream_bytes"] = sum(item.num_bytes for item in part.items)

    def _socket_rates(self, name: str, *, active: bool) -> None:
        from bench.references import SocketPeer

        peer = SocketPeer(self.own_bytes) if active else None
        for repeat in range(self.plan.repeats + 1):
            self.barrier()
            if peer is not None:
                with self.samples.timed(name if repeat else f"warm-up {name}"):
                    peer.receive()
        if peer is not None:
            peer.close()
        self.barrier()

    # Where the time goes, and the memory.

    def restore_phases(self) -> None:
        """Restores again, with the package's own steps timed: slightly slower, so apart."""
        from bench.phases import RESTORE, timed_phases

        with timed_phases(self.samples, RESTORE):
            self._restores("phased restore", "memory:local")

    def memory(self) -> None:
        """The peak of several snapshots in a row: private memory of all processes, and the stores' segments once."""
        import ray_jax_ckpt as rjc
        from bench.usage import PeakMeter, private_bytes

        processes = self._processes() if self.rank == 0 else []
        with PeakMeter(lambda: private_bytes(processes)) if self.rank == 0 else contextlib.nullcontext() as meter:
            for _ in range(self.plan.repeats):
                self.step()
                self.handle = rjc.snapshot(self.number, self.state)
            rjc.wait(WAIT_S)
            self.barrier()
        if meter is not None:
            self.samples.facts["memory peak"] = {"private": meter.peak, "segments": self._segment_bytes()}

    def _note_memory(self, when: str) -> None:
        if "memory" not in self.plan.parts:
            return
        self.barrier()
        if self.rank == 0:
            from bench.usage import measure_processes, private_bytes

            processes = self._processes()
            self.samples.facts[f"memory {when}"] = {
                "processes": measure_processes(processes),
                "private": private_bytes(processes),
                "segments": self._segment_bytes(),
            }
        self.barrier()

    def _processes(self) -> Any:
        from bench.usage import find_processes

        return find_processes(self._raylets)

    def _segment_bytes(self) -> int:
        return sum(self._session.ask(store.held_bytes.remote()) for store in self._session.decision.stores.values())

    # References.

    def machine(self) -> None:
        """Copies and digests of as many bytes, by both ranks at once."""
        from bench.references import measure_copies

        measure_copies(self.samples, self.own_bytes, self.plan.repeats, self.barrier)

    def save_async(self) -> None:
        """Orbax's saving in the background, to the disk and to memory."""
        from bench import orbax_peers

        for where, folder in orbax_peers.folders(self.work).items():
            orbax_peers.save_async(self, where, folder)

    def snapshotter(self) -> None:
        """Orbax's Snapshotter, every rank on its own part of the state."""
        from bench import orbax_peers

        self.state = orbax_peers.to_local(self)
        self._peer = orbax_peers.snapshotter(self)

    def loads(self) -> None:
        """What Orbax's Snapshotter restores from."""
        from bench import orbax_peers

        if self._peer is None:
            self.state = orbax_peers.to_local(self)
        orbax_peers.load(self, self._peer)
