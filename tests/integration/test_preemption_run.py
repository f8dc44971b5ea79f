"""A run of stock JaxTrainer whose node is drained, and is gone before the deadline: the others save what there is.

The run is made once; the tests look at what it left behind.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import job
import preempted
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from training_cluster import training_cluster

import ray_jax_ckpt as rjc
from ray_jax_ckpt.testing import drain_node, kill_node

pytestmark = pytest.mark.timeout(480)

# One node to spare.
POLL = {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
NOTICE_S, GONE_AFTER_S, GRACE_S = 8.0, 5.0, 3.0


@dataclasses.dataclass
class Run:
    """What a finished run left behind, and when its node was to be gone."""

    directory: Path
    deadline: float = 0.0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """Of the first attempt."""
        return job.read(self.directory, 1, rank, "step")

    def preempt(self) -> None:
        """Drains rank 1's node when it trains, and takes it away before the deadline."""
        started = time.monotonic()
        while len(self.steps(1)) < 10:
            assert time.monotonic() < started + 200
            time.sleep(0.05)
        node = job.read(self.directory, 1, 1, "started")[0]["node"]
        self.deadline = time.time() + NOTICE_S
        drain_node(node, deadline_s=NOTICE_S)
        time.sleep(GONE_AFTER_S)
        kill_node(node)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("preempted"))
    trainer = JaxTrainer(
        preempted.train,
        train_loop_config=run.directory,
        jax_config=rjc.JaxConfig(compilation_cache_dir=""),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="preempted",
            storage_path=str(run.directory / "storage"),
            failure_config=FailureConfig(
                max_failures=1, preemption_grace_s=GRACE_S, relax_collectives_on_preemption=True
            ),
            callbacks=[rjc.CheckpointManager(snapshot=rjc.SnapshotConfig(every_n_steps=preempted.NEVER, copies=2))],
            worker_runtime_env={
                "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
            },
        ),
    )
    with training_cluster(3, job, preempted, environment=POLL):
        preemption = threading.Thread(target=run.preempt, daemon=True)
        preemption.start()
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # Ray Data warns of its own settings
            result = trainer.fit()
        preemption.join(timeout=30)
    assert result.error is None
    path = run.directory / "storage" / "preempted" / "ray_jax_ckpt" / "events.jsonl"
    run.events = [json.loads(line) for line in path.read_text().splitlines()]
    return run


def test_a_step_that_no_cadence_names_is_snapshotted_by_all_ranks(run):
    draining, announced = run.noted("draining")[0], run.noted("snapshot_announced")[0]
    assert draining["ranks"] == announced["leaving"] == [1]
    taken = [[found["step"] for found in run.steps(rank) if found["taken"]] for rank in range(2)]
    assert taken[0][0] == taken[1][0] == announced["step"]
    # The other rank was gone when the last ones were taken.
    assert taken[0][-1] > run.steps(1)[-1]["step"]


def test_survivors_go_on_through_deadline_and_grace(run):
    assert run.steps(0)[-1]["at"] > run.deadline + GRACE_S / 2


def test_what_survivors_hold_is_restored_without_the_rank_that_was_gone(run):
    last = run.noted("snapshot_announced")[-1]
    assert last["step"] > run.steps(1)[-1]["step"]
    assert {"step": last["step"], "ranks": [1]}.items() <= run.noted("completed_without")[-1].items()
    for rank in range(2):
        (restored,) = job.read(run.directory, 2, rank, "restored")
        assert (restored["step"], restored["counts"]) == (last["step"], [last["step"]])


def test_the_new_group_leaves_the_drained_node_alone(run):
    drained = set(run.noted("draining")[0]["nodes"])
    nodes = {job.read(run.directory, 2, rank, "started")[0]["node"] for rank in range(2)}
    assert len(nodes) == 2
    assert nodes.isdisjoint(drained)
