"""The state that a run's coordinator keeps on storage, and the list of checkpoints that is made of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ray
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.storage.state import STATE, State, current_state
from ray_jax_ckpt.testing import Fault


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(100, step), "n": step}


def on_storage(run: Any) -> State:
    return current_state(run.filesystem, run.path)


def test_every_checkpoint_is_in_the_books_with_what_became_of_it(run_of, plan):
    run = run_of(every_n_steps=1, num_to_keep=2, score_attribute="eval.loss", score_order="min")
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, 1.0)):
        run.take_at(step, state_of(step), metrics={"eval": {"loss": jnp.float32(loss)}, "kind": "test"})
        eventually(lambda step=step: step in run.steps(), 60)
    run.await_steps(1, 3, 4)
    eventually(lambda: not json.loads(Path(run.path, STATE).read_text())["removing"], 60)
    state = on_storage(run)
    found = {one.step: (one.status, one.metrics["eval"]["loss"]) for one in state.checkpoints}
    assert found == {1: ("complete", 0.5), 3: ("complete", 0.25), 4: ("complete", 1.0)}
    assert all(one.num_bytes and one.path.startswith("ray_jax_ckpt/checkpoints/") for one in state.checkpoints)
    # In the train function, and from anywhere.
    for listed in (rjc.checkpoints(), rjc.checkpoints(consistency="validated"), rjc.checkpoints(run.path)):
        assert [(one.step, one.status, one.origin) for one in listed] == [
            (1, "complete", "persist"),
            (3, "complete", "persist"),
            (4, "complete", "persist"),
        ]
        assert listed[0].metrics["kind"] == "test"
    [attempt] = state.attempts
    assert (attempt.attempt, attempt.tier, attempt.ended) == (1, None, None)
    run.begin()
    ray.get(run.coordinator.finish.remote(keep=False))
    state = on_storage(run)
    assert [(one.attempt, one.step, one.ended) for one in state.attempts] == [(1, None, "failed"), (2, 4, "finished")]
    assert state.finished_at_s is not None
    first = state.driver
    # Another driver finds half of a state: the one before serves, and the half is kept.
    run.close()
    run.coordinator = None
    Path(run.path, STATE).write_text("{half")
    run.begin()
    eventually(lambda: list(Path(run.path, "ray_jax_ckpt").glob("state.damaged-*.json")), 60)
    assert [one.step for one in rjc.checkpoints()] == [1, 3, 4]
    state = on_storage(run)
    # The attempt that the damaged state had counted is not counted again.
    assert [(one.step, one.ended) for one in state.attempts] == [(None, "failed"), (4, "failed"), (4, None)]
    assert state.driver.id != first.id


def test_a_write_that_fails_is_listed_with_its_reason(run_of, disk):
    run = run_of(every_n_steps=1, filesystem=disk.filesystem)
    eventually(lambda: Path(run.path, STATE).exists(), 60)
    disk.says("full")
    run.take_at(1, state_of(1))
    eventually(lambda: [one.status for one in rjc.checkpoints(status="all")] == ["failed"], 60)
    [failed] = rjc.checkpoints(status="all")
    assert (failed.step, failed.attempt) == (1, 1)
    assert "No space left" in failed.reason
    assert rjc.checkpoints() == []
    disk.says("")
    eventually(lambda: [one.step for one in rjc.checkpoints()] == [1], 60)


def test_committed_is_when_nothing_is_being_written(run_of, plan):
    run = run_of(every_n_steps=1)
    held = plan.arm(Fault("finish", "stop"))
    run.take_at(1, state_of(1))
    eventually(lambda: [one.status for one in rjc.checkpoints(status="all")] == ["pending"], 60)
    with pytest.raises(rjc.errors.SnapshotTimeoutError, match=r"were committed within 0\.5 s.*pending"):
        rjc.checkpoints(consistency="committed", timeout_s=0.5)
    with pytest.raises(rjc.errors.SnapshotTimeoutError, match="pending"):
        rjc.checkpoints(run.path, consistency="committed", timeout_s=0.5)
    threading.Timer(0.5, lambda: held.wait(30).resume()).start()
    assert [one.step for one in rjc.checkpoints(consistency="committed", timeout_s=60)] == [1]
