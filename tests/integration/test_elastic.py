"""One run of stock JaxTrainer that loses two of its four nodes at once, goes on with two, and grows to four again."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_job as job
import jax
import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from training_cluster import NODE, training_cluster

import ray_jax_ckpt as rjc
from ray_jax_ckpt.memory.claim import coordinator_name
from ray_jax_ckpt.memory.fleet import NAMESPACE
from ray_jax_ckpt.testing import kill_node

# Three starts of two to four processes: a minute and a half on an idle machine with two cores, minutes on a busy one.
pytestmark = pytest.mark.timeout(480)

ROOT = Path(__file__).resolve().parents[2]
COPIES = 2


@dataclasses.dataclass
class Memory:
    """The most that each store has held while a group of a size was training, by world size and node."""

    held: dict[tuple[int, str], int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    resident: int = 0
    samples: int = 0

    def look(self, world_size: int) -> None:
        """Asks every living store once; those of dead nodes do not answer."""
        handles = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and not actor["name"].startswith(coordinator_name("")):
                with contextlib.suppress(ValueError):
                    handles[actor["name"]] = ray.get_actor(actor["name"], namespace=NAMESPACE)
        refs = {name: handle.held_bytes.remote() for name, handle in handles.items()}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=1) if refs else ([], [])
        for name, ref in refs.items():
            if ref in ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    key = world_size, name.split(":")[1]
                    self.held[key] = max(self.held[key], ray.get(ref))
                    self.samples += 1
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith("ray::ReplicaStore"):
                    self.resident = max(self.resident, process.memory_info().rss)

    def peak(self, world_size: int) -> int:
        return max((most for (size, _), most in self.held.items() if size == world_size), default=0)


class Fate(threading.Thread):
    """What happens to the cluster, as the run gets on; and what its stores hold meanwhile."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        super().__init__(daemon=True)
        self.cluster, self.directory, self.memory = cluster, directory, Memory()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._wait_for(4, "protected")
            nodes = {each["rank"]: each["node"] for each in job.read(self.directory, "started")}
            # No two neighbours in the ring of copies: each one's shards are on the next one, too.
            for rank in (0, 2):
                kill_node(nodes[rank])
            self._wait_for(2, "protected")
            # Handlers of signals are for the main thread; the fixture shuts these nodes down as well.
            self.cluster._shutdown_at_exit = False
            for _ in range(2):
                self.cluster.add_node(**NODE, wait=False)
            while not self.over.wait(0.3):
                self._look()
        except BaseException as error:
            self.error = error
            (self.directory / "over").touch()

    def _wait_for(self, world_size: int, event: str) -> None:
        while not self.over.wait(0.3):
            self._look()
            if sum(each["world_size"] == world_size for each in job.read(self.directory, event)) == world_size:
                return

    def _look(self) -> None:
        started = job.read(self.directory, "started")
        self.memory.look(max(started, key=lambda each: each["attempt"])["world_size"] if started else 0)
        # Ray Train decides by a view of the nodes that is renewed every 20 s.
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            view = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
            view.get_reserved_resources.remote("nobody", recompute=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a finished run has left."""

    directory: Path
    memory: Memory

    def seen(self, event: str) -> list[dict[str, Any]]:
        return job.read(self.directory, event)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that never trains, and four nodes with room for one worker each."""
    environment = {
        # No idle workers, which no actor would use.
        "RAY_prestart_worker_first_driver": "0",
        # The first group after the deaths is asked for before Ray knows of them, and waits for nodes that are gone.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "8",
    }
    with training_cluster(4, job, environment=environment) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("elastic")
    fate = Fate(cluster, directory)
    fate.start()
    trainer = JaxTrainer(
        job.train,
        train_loop_config=directory,
        jax_config=rjc.JaxConfig(compilation_cache_dir=str(directory / "xla")),
        scaling_config=ScalingConfig(
            num_workers=(2, 4), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=2
        ),
        run_config=RunConfig(
            name="elastic",
            storage_path=str(directory / "storage"),
            failure_config=FailureConfig(max_failures=3),
            callbacks=[rjc.CheckpointManager(snapshot=rjc.SnapshotConfig(every_n_steps=job.EVERY, copies=COPIES))],
            worker_runtime_env={
                "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
            },
        ),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # Ray Data warns of its own settings
            result = trainer.fit()
    finally:
        fate.over.set()
        fate.join(30)
    assert result.error is None
    assert fate.error is None
    return Run(directory, fate.memory)


@pytest.fixture(scope="module")
def expected(run: Run) -> dict[int, dict[str, np.ndarray]]:
    """The state after every step that was restored or that the run ended with: in one process, on one device."""
    wanted = {each["step"] for event in ("restored", "finished") for each in run.seen(event)}
    states, state, batches, step = {}, job.start(), job.order(0, 1), jax.jit(job.advance)
    for number in range(1, max(wanted) + 1):
        state = step(state, next(batches))
        if number in wanted:
            states[number] = {k: np.asarray(v) for k, v in (state | {"key": jax.random.key_data(state["key"])}).items()}
    return states


def test_the_run_went_from_four_to_two_to_four_workers(run):
    sizes = {each["attempt"]: each["world_size"] for each in run.seen("started")}
    assert (sizes[1], sizes[max(sizes)]) == (4, 4)
    assert 2 in sizes.values()
    assert len({each["node"] for each in run.seen("started")}) == 6
    for each in run.seen("started"):
        assert each["devices"] == 2 * each["world_size"]


def test_every_group_restores_what_the_one_before_had_protected_bit_for_bit(run, expected):
    protected = {each["attempt"]: each["latest"] for each in run.seen("protected")}
    restored = run.seen("restored")
    # A group that is resized before it has restored trains nothing.
    assert {each["attempt"] for each in restored} >= {each["attempt"] for each in run.seen("step")} - {1} != set()
    for each in restored:
        before = [step for attempt, step in protected.items() if attempt < each["attempt"]]
        assert each["step"] >= max(before)
        check(each["pieces"], expected[each["step"]])
    for attempt in {each["attempt"] for each in restored}:
        assert len({each["step"] for each in restored if each["attempt"] == attempt}) == 1


def test_the_run_ends_with_the_state_of_an_uninterrupted_one(run, expected):
    finished = run.seen("finished")
    assert len(finished) == 4
    for each in finished:
        check(each["pieces"], expected[each["step"]])


def check(pieces: list[list[Any]], wanted: dict[str, np.ndarray]) -> None:
    for name, dtype, first, stop, digest in pieces:
        piece = wanted[name][first:stop]
        assert (dtype, digest) == (str(piece.dtype), job.digest(piece)), (name, first, stop)


def test_every_step_of_every_group_sees_the_same_global_batch(run):
    batches, alone = defaultdict(list), job.order(0, 1)
    for each in run.seen("step"):
        batches[each["attempt"], each["step"]] += each["ids"]
    wanted = [sorted(next(alone).tolist()) for _ in range(max(step for _, step in batches))]
    # Ranks that are killed may not have come to write down their last steps, which the next group makes again.
    complete = {key: ids for key, ids in batches.items() if len(ids) == job.GLOBAL_BATCH}
    for (_, step), ids in complete.items():
        assert sorted(ids) == wanted[step - 1]
    assert {step for _, step in complete} == set(range(1, len(wanted) + 1))


def test_memory_stays_within_the_stated_bound(run):
    """Two buffers of `copies` shares; what a group of another size restores counts for one of them."""
    print("\npeak held, in unique bytes:", {k: round(v / job.UNIQUE_BYTES, 3) for k, v in run.memory.held.items()})
    print("largest store process, MB:", run.memory.resident // 10**6, "samples:", run.memory.samples)
    assert run.memory.samples > 20
    for world_size in (2, 4):
        smallest = 2 if world_size == 2 else min(2, *(size for size, _ in run.memory.held if size))
        bound = 2 * COPIES * job.UNIQUE_BYTES / smallest
        assert 0 < run.memory.peak(world_size) <= bound * 1.02
