"""Stock JaxTrainer runs whose snapshots go to storage: reported, and by the stores; then a run that resumes from there.

The runs are made once; the tests look at what they left behind.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import job
import pyarrow.fs
import pytest
import stored_job
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from support import find_checkpoints
from training_cluster import training_cluster

import ray_jax_ckpt as rjc
from ray_jax_ckpt.storage.reader import verify

pytestmark = pytest.mark.timeout(480)

LOCAL = pyarrow.fs.LocalFileSystem()
MORE = 3

ORBAX = """
import sys, numpy as np, jax
from orbax.checkpoint import v1
# Orbax needs to be told where things go: the devices that they were on are not here.
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
key = jax.random.key(0)
abstract = {
    "count": jax.ShapeDtypeStruct((1000,), np.int32, sharding=here),
    "step": 0,
    "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=here),
}
state = v1.load(sys.argv[1], abstract)
assert "ray_jax_ckpt" not in sys.modules
assert (np.asarray(state["count"]) == int(sys.argv[2])).all() and state["count"].shape == (1000,)
assert state["step"] == int(sys.argv[2])
assert (jax.random.key_data(state["key"]) == jax.random.key_data(jax.random.key(5))).all()
print("ok")
"""


@dataclasses.dataclass
class Runs:
    """What was left behind."""

    storage: Path
    results: list[Any]
    attempts: list[Path]

    @property
    def ours(self) -> dict[int, str]:
        """Paths of the stores' checkpoints, by step."""
        return {manifest.step or 0: path for path, manifest in find_checkpoints(LOCAL, str(self.storage / "run"))}


def fit(work: Path, number: int, last: int) -> Any:
    trainer = JaxTrainer(
        lambda config: stored_job.train(config["directory"], config["last"]),
        train_loop_config={"directory": work / f"attempt{number}", "last": last},
        jax_config=rjc.JaxConfig(platform="cpu"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(work / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[
                rjc.CheckpointManager(
                    snapshot=rjc.SnapshotConfig(every_n_steps=1, copies=2),
                    persist=rjc.PersistConfig(every_n_steps=5, num_to_keep=2),
                )
            ],
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    work = tmp_path_factory.mktemp("stored")
    found = Runs(work / "storage", [], [])
    with training_cluster(2, job, stored_job):
        for number, last in ((1, stored_job.STEPS), (2, stored_job.STEPS + MORE)):
            (work / f"attempt{number}").mkdir()
            found.results.append(fit(work, number, last))
            found.attempts.append(work / f"attempt{number}")
    return found


def load_with_orbax(path: str, step: int) -> None:
    found = subprocess.run([sys.executable, "-c", ORBAX, path, str(step)], capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == "ok", found.stderr


def test_reported_snapshots_are_checkpoints_that_plain_orbax_reads(runs):
    best = [checkpoint for checkpoint, _ in runs.results[0].best_checkpoints]
    steps = []
    for checkpoint in best:
        manifest = verify(LOCAL, checkpoint.path)
        steps.append(manifest.step)
        load_with_orbax(checkpoint.path, manifest.step)
    # Each in one of Ray's two modes.
    assert sorted(steps) == [8, 12]
    assert runs.results[0].checkpoint.path in [checkpoint.path for checkpoint in best]


def test_the_stores_wrote_what_was_due_and_the_last_step(runs):
    events = [json.loads(line) for line in (runs.storage / "run/ray_jax_ckpt/events.jsonl").read_text().splitlines()]
    written = [event["step"] for event in events if event["event"] == "persisted"]
    # The last step of each run, whatever else was due when.
    assert {stored_job.STEPS, stored_job.STEPS + MORE} <= set(written)
    assert set(runs.ours) == set(sorted(written)[-2:])
    for step, path in runs.ours.items():
        verify(LOCAL, path)
        load_with_orbax(path, step)


def test_a_new_run_of_the_same_name_goes_on_from_storage(runs):
    for rank in (0, 1):
        (restored,) = job.read(runs.attempts[1], 1, rank, "restored")
        assert (restored["step"], restored["source"]) == (stored_job.STEPS, "storage")
        assert restored["counts"] == [stored_job.STEPS]
        assert restored["data"] == {"taken": stored_job.STEPS * 10 + rank}


def test_the_books_have_what_the_stores_wrote_and_what_was_reported(runs):
    run = runs.storage / "run"
    listed = rjc.checkpoints(run, consistency="validated")
    found = {(one.origin, one.step): (one.status, one.metrics) for one in listed}
    assert {step for origin, step in found if origin == "persist"} == set(runs.ours)
    reported = {Path(checkpoint.path).name for checkpoint, _ in runs.results[1].best_checkpoints}
    assert {Path(one.path).name for one in listed if one.origin == "report"} == reported
    for (origin, step), (status, metrics) in found.items():
        assert (status, metrics["loss"]) == ("complete", 1.0 / step)
        assert ("step" in metrics) is (origin == "report")
    state = json.loads((run / "ray_jax_ckpt/state.json").read_text())
    assert [(one["attempt"], one["ended"], one["last_step"]) for one in state["attempts"]] == [
        (1, "finished", stored_job.STEPS),
        (2, "finished", stored_job.STEPS + MORE),
    ]
    assert state["attempts"][1]["tier"] == "storage"
    assert state["finished_at_s"] is not None
    assert state["report_index"] == (stored_job.STEPS + MORE) // stored_job.REPORTED


def test_the_list_in_the_train_function_has_what_was_just_reported(runs):
    for rank in (0, 1):
        found = job.read(runs.attempts[0], 1, rank, "listed")
        assert [one["step"] for one in found] == [4, 8, 12]
        assert all(one["step"] in one["reported"] for one in found)
