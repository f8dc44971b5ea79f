"""Runs of stock JaxTrainer that lose a worker, a whole node, or their controller, and end as if nothing had happened.

Each run is made once; the tests look at what it left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job
import psutil
import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

import ray_jax_ckpt as rjc
from ray_jax_ckpt.memory.fleet import NAMESPACE
from ray_jax_ckpt.testing import Armed, Fault, FaultPlan, kill_node

# Four starts of two processes: well under two minutes on an idle machine with two cores, minutes on a busy one.
pytestmark = pytest.mark.timeout(480)

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ray::ReplicaStore", "ray::Coordinator")
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def plan() -> Iterator[FaultPlan]:
    """In the environment before the cluster starts, so that all its processes have it."""
    with FaultPlan() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(plan: FaultPlan) -> Iterator[Cluster]:
    """A head that never trains, and two nodes with room for one worker each."""
    with pytest.MonkeyPatch.context() as patch:
        # The controller unpickles the callback, and imports this package for it.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        with forks_allowed():
            cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
            for _ in range(2):
                cluster.add_node(**NODE)
            connect(cluster)
        cloudpickle.register_pickle_by_value(job)
        try:
            yield cluster
        finally:
            cloudpickle.unregister_pickle_by_value(job)
            ray.shutdown()
            cluster.shutdown()


def connect(cluster: Cluster) -> None:
    # Ray Train's clean-up asks "the" cluster of this machine, which may be another one.
    environment = {"env_vars": {"RAY_ADDRESS": cluster.address}}
    ray.init(address=cluster.address, runtime_env=environment, log_to_driver=False)


@contextlib.contextmanager
def forks_allowed() -> Iterator[None]:
    """JAX may run in this process; what Ray forks off executes another program at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        yield


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: the ranks' records, and the manager's events."""

    directory: Path
    events: list[dict[str, Any]]
    left_behind: list[str]

    def seen(self, attempt: int, event: str) -> list[Any]:
        return [found for rank in range(2) for found in job.read(self.directory, attempt, rank, event)]

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]


def trainer_of(config: job.Config, max_failures: int, persist: rjc.PersistConfig | None = None) -> JaxTrainer:
    directory, death = config.directory, config.death
    snapshot = rjc.SnapshotConfig(every_n_steps=job.EVERY, copies=2)
    return JaxTrainer(
        job.train,
        train_loop_config=config,
        jax_config=rjc.JaxConfig(compilation_cache_dir=str(directory.parent / "xla")),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=death,
            storage_path=str(directory / "storage"),
            failure_config=FailureConfig(max_failures=max_failures),
            callbacks=[rjc.CheckpointManager(snapshot=snapshot, persist=persist)],
            worker_runtime_env={
                "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
            },
        ),
    )


def fit(trainer: JaxTrainer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # Ray Data warns of its own settings
        return trainer.fit()


def finish(directory: Path, death: str, template: str, max_failures: int = 1) -> Run:
    result = fit(trainer_of(job.Config(directory, death, template), max_failures))
    assert result.error is None
    return looked_at(directory, death)


def looked_at(directory: Path, death: str) -> Run:
    lines = (directory / "storage" / death / "ray_jax_ckpt" / "events.jsonl").read_text().splitlines()
    return Run(directory, [json.loads(line) for line in lines], leftovers())


def leftovers(timeout_s: float = 30.0) -> list[str]:
    """Named actors of this package, and processes of stores, that do not go away after a run."""
    deadline = time.monotonic() + timeout_s
    while True:
        actors = [
            str(each) for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE
        ]
        left = actors + [name for name in map(title, descendants()) if name.startswith(OURS)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="module")
def worker_death(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 1 died; its node lived on."""
    return finish(tmp_path_factory.mktemp("worker"), "worker", "abstract")


@pytest.fixture(scope="module")
def node_death(cluster: Cluster, worker_death: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Raylet, worker and store of rank 1 died together, with a spare node at hand."""
    directory = tmp_path_factory.mktemp("node")
    with forks_allowed():
        cluster.add_node(**NODE)
    killer = threading.Thread(target=kill_when_doomed, args=(directory, kill_the_node), daemon=True)
    killer.start()
    run = finish(directory, "node", "concrete")
    killer.join(timeout=30)
    assert not killer.is_alive()
    return run


@pytest.fixture(scope="module")
def failures(cluster: Cluster, plan: FaultPlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Armed]]:
    """A worker dies while it copies, another one during the restore; then the coordinator, and a store."""
    faults = [
        Fault("copy", "kill", rank=1, step=9),
        Fault("read", "kill", rank=0, step=job.PROTECTED),
        Fault("report", "kill", step=9, occurrence=3),
        Fault("committed", "kill", rank=0, step=12),
    ]
    armed = [plan.arm(fault) for fault in faults]
    return finish(tmp_path_factory.mktemp("failures"), "plan", "abstract", max_failures=2), armed


@pytest.fixture(scope="module")
def controller_death(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str, Any]:
    """The controller died; what its driver saw, and what became of the same run with the next driver.

    In one driver Ray frees what the dead controller had reserved only where it can ask its dashboard, which takes
    `ray[default]` (`PlacementGroupCleaner` of Ray 2.60); when a driver ends it is free in any case.
    """
    directory = tmp_path_factory.mktemp("controller")
    config = job.Config(directory, "controller", "abstract", linger_s=5.0)
    persist = rjc.PersistConfig(every_n_steps=job.EVERY, num_to_keep=2)
    killer = threading.Thread(target=kill_when_doomed, args=(directory, kill_controller), daemon=True)
    killer.start()
    with pytest.raises(RayError) as caught:
        fit(trainer_of(config, 1, persist))
    killer.join(timeout=30)
    ray.shutdown()
    connect(cluster)
    result = fit(trainer_of(config, 0, persist))
    assert result.error is None
    return looked_at(directory, "controller"), repr(caught.value), result


def kill_the_node(doomed: dict[str, Any]) -> None:
    kill_node(doomed["node"])


def kill_controller(_: dict[str, Any]) -> None:
    (controller,) = [one for one in descendants() if title(one).startswith("ray::TrainController")]
    controller.kill()


def kill_when_doomed(directory: Path, kill: Callable[[dict[str, Any]], None], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if doomed := job.read(directory, 1, 1, "doomed"):
            kill(doomed[0])
            return
        time.sleep(0.05)


@pytest.fixture(scope="module")
def reference() -> tuple[list[str], dict[str, Any]]:
    return job.uninterrupted()


@pytest.fixture(params=["worker", "node"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(f"{request.param}_death")


def test_ranks_start_afresh_once_and_from_a_snapshot_the_second_time(run):
    assert [found["checkpoint"] for found in run.seen(1, "started")] == ["NoneType"] * 2
    assert [found["checkpoint"] for found in run.seen(2, "started")] == ["SnapshotCheckpoint"] * 2
    assert [found["devices"] for attempt in (1, 2) for found in run.seen(attempt, "started")] == [[2, 4]] * 4
    assert run.seen(3, "started") == []


def test_a_dead_worker_restores_the_newest_complete_step_from_its_node(worker_death):
    restored = worker_death.seen(2, "restored")
    assert [(found["step"], found["source"]) for found in restored] == [(job.PROTECTED, "memory:local")] * 2


def test_a_rank_without_its_node_restores_the_same_step_from_a_peer(node_death):
    restored = node_death.seen(2, "restored")
    assert [found["step"] for found in restored] == [job.PROTECTED] * 2
    # One node lives on with copies of everything; the spare had none of anything.
    assert sorted(found["source"] for found in restored) == ["memory:local", "memory:peer"]


def test_steps_were_lost_and_made_again(run):
    for rank in range(2):
        first, second = ([s["step"] for s in job.read(run.directory, n, rank, "step")] for n in (1, 2))
        # The survivor is killed too, perhaps before it has written down the step that the other one died after.
        assert first in [
            list(range(1, last + 1)) for last in ((job.DEATH,) if rank == 1 else (job.DEATH - 1, job.DEATH))
        ]
        assert second == list(range(job.PROTECTED + 1, job.STEPS + 1))


def test_every_loss_and_the_final_state_are_those_of_an_uninterrupted_run(run, reference):
    losses, state = reference
    for attempt in (1, 2):
        for found in run.seen(attempt, "step"):
            assert found["loss"] == losses[found["step"] - 1], (attempt, found["step"])
    finished = run.seen(2, "finished")
    assert len(finished) == 2
    for found in finished:
        assert found["state"] == state


def test_each_rank_gets_its_data_and_metrics_back(run, reference):
    for rank, found in enumerate(run.seen(2, "restored")):
        assert found["data"] == {"rank": rank, "taken": job.PROTECTED, "seen": {"0": job.PROTECTED, "1": job.PROTECTED}}
        assert found["metrics"] == {"loss": float.fromhex(reference[0][job.PROTECTED - 1])}


def test_waiting_made_the_step_the_newest_complete_one(run):
    assert [found["latest"] for found in run.seen(1, "protected")] == [job.PROTECTED] * 2


def test_what_was_decided_is_on_record(run):
    decisions = [(found["attempt"], found["step"]) for found in run.noted("decision")]
    assert decisions == [(1, None), (2, job.PROTECTED)]
    assert len(run.noted("worker_group_failed")) == 1
    assert {found["source"] for found in run.noted("restore_end")} == {s["source"] for s in run.seen(2, "restored")}


def test_a_finished_run_leaves_nothing_behind(run):
    assert run.left_behind == []


def test_a_second_failure_during_the_restore_loses_nothing_and_dead_stores_and_coordinators_cost_no_restart(
    failures, reference
):
    run, armed = failures
    assert all(one.fired() for one in armed), [one.fired() for one in armed]
    assert [found["checkpoint"] for found in run.seen(3, "started")] == ["SnapshotCheckpoint"] * 2
    assert [found["step"] for found in run.seen(3, "restored")] == [job.PROTECTED] * 2
    assert run.seen(4, "started") == []
    losses, state = reference
    assert [found["loss"] for found in job.read(run.directory, 3, 0, "step")] == losses[job.PROTECTED :]
    assert [found["state"] for found in run.seen(3, "finished")] == [state] * 2
    assert run.left_behind == []


def test_after_its_controller_s_death_the_run_goes_on_from_memory_with_the_next_driver(controller_death, reference):
    run, said, _ = controller_death
    assert "ActorDied" in said, said
    restored = run.seen(2, "restored")
    assert [(found["step"], found["source"]) for found in restored] == [(job.PROTECTED, "memory:local")] * 2
    losses, state = reference
    assert [found["loss"] for found in job.read(run.directory, 2, 0, "step")] == losses[job.PROTECTED :]
    assert [found["state"] for found in run.seen(2, "finished")] == [state] * 2
    # The attempts are numbered on.
    assert [(found["attempt"], found["step"]) for found in run.noted("decision")] == [(1, None), (2, job.PROTECTED)]
    assert run.left_behind == []


def test_a_run_of_which_one_rank_returns_long_before_the_other_ends_once_with_all_that_was_due(controller_death):
    run, _, result = controller_death
    assert len(run.seen(2, "returned")) == 2
    assert run.seen(3, "started") == []
    assert [found.step for found in rjc.checkpoints(result)] == [9, 12]
    assert len(run.noted("finished")) == 1
