"""Stock JaxTrainer runs that are set up by environment variables alone, or in which everything is switched off."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import job
import pytest
import started_job
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.validation_config import ValidationConfig
from ray.train.v2.jax import JaxTrainer
from training_cluster import training_cluster

import ray_jax_ckpt as rjc

pytestmark = pytest.mark.timeout(480)


def fit(work: Path, number: int, callbacks: list[Any]) -> tuple[Any, list[str], Path]:
    """The result, what was warned of, and the directory of records."""
    directory = work / f"run{number}"
    directory.mkdir()
    trainer = JaxTrainer(
        lambda config: started_job.train(config["directory"]),
        train_loop_config={"directory": directory},
        jax_config=rjc.JaxConfig(platform="cpu"),
        scaling_config=ScalingConfig(num_workers=1),
        validation_config=ValidationConfig(fn=started_job.validate, ray_remote_kwargs={"num_cpus": 0}),
        run_config=RunConfig(
            name="run",
            storage_path=str(work / "storage"),
            callbacks=callbacks,
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return trainer.fit(), [str(one.message) for one in caught], directory


def recorded(directory: Path, event: str) -> dict[str, Any]:
    (found,) = job.read(directory, 1, 0, event)
    return found


def test_a_run_needs_no_line_of_code_and_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_jax_ckpt.EnvCheckpointManager")
    monkeypatch.setenv("RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS", "1")
    monkeypatch.setenv("RAY_JAX_CKPT_SNAPSHOT_COPIES", "1")
    with training_cluster(1, job, started_job):
        result, _, directory = fit(tmp_path, 1, [])
        assert recorded(directory, "finished") | {"event": 0} == {
            "event": 0,
            "latest": started_job.STEPS,
            "taken": True,
            "platform": "cpu",
        }
        # Ray has validated what was reported, and it is a checkpoint.
        ((checkpoint, metrics),) = result.best_checkpoints
        assert metrics == {"step": 2, "validated_step": 2, "first": 2.0}
        assert rjc.restore(checkpoint).step == 2
        log = tmp_path / "storage/run/ray_jax_ckpt/events.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()]
        (hooks,) = [event["hooks"] for event in events if event["event"] == "hooks"]
        assert hooks["after_controller_start"]["calls"] == hooks["_hand_over"]["calls"] == 1
        assert hooks["after_worker_group_poll_status"]["calls"] > 0

        monkeypatch.setenv("RAY_JAX_CKPT_ENABLED", "0")
        result, _, directory = fit(tmp_path, 2, [rjc.CheckpointManager()])
        assert result.error is None
        # What Ray alone does: its own latest checkpoint, which can be read as ever; and nothing is taken.
        restored = recorded(directory, "restored")
        assert (restored["step"], restored["source"], restored["first"]) == (2, "storage", 2.0)
        found = recorded(directory, "finished")
        assert (found["latest"], found["taken"]) == (None, False)
        assert len(log.read_text().splitlines()) == len(events)
