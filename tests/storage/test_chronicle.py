"""A run's state as it follows from what happens to the run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ray_jax_ckpt.model.choice import Tier
from ray_jax_ckpt.model.metrics import encode
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.chronicle import MAX_FAILURES, after, pending_of, with_rays_list
from ray_jax_ckpt.storage.records import Record, State, parse_state

RUN = "/runs/run"


def told(state: State, event: str, at_s: float = 10.0, **fields: Any) -> State:
    return after(state, event, at_s, fields, RUN)


def about(step: int, attempt: int = 1) -> dict[str, Any]:
    return {"path": f"{RUN}/ray_jax_ckpt/checkpoints/c{step}", "step": step, "generation": f"{attempt}.0.{step}"}


def only(state: State) -> Record:
    [record] = state.checkpoints
    return record


def test_a_checkpoint_from_its_beginning_to_its_end():
    state = told(State(), "persisting", **about(5), why="cadence")
    assert (only(state).status, only(state).path) == (Status.PENDING, "ray_jax_ckpt/checkpoints/c5")
    assert pending_of(state, "committed") == list(state.checkpoints)
    state = told(state, "persisted", **about(5), metrics=encode({"loss": math.inf}), num_bytes=9)
    assert (only(state).status, only(state).metrics, only(state).num_bytes) == (Status.COMPLETE, {"loss": math.inf}, 9)
    assert pending_of(state, "validated") == []
    gone = told(state, "superfluous", path=about(5)["path"], step=5)
    assert (gone.checkpoints, gone.removing) == ((), (only(state).path,))
    assert told(gone, "checkpoint_removed", path=about(5)["path"]).removing == ()
    lost = only(told(state, "suspected", path=about(5)["path"], said="digest"))
    assert (lost.status, lost.reason) == (Status.LOST, "digest")


def test_failures_say_why_and_are_not_remembered_for_ever():
    state = told(State(), "persisted", **about(1))
    for step in range(2, 50):
        late = {"timed_out": step % 2 == 0, "error": "slow"}
        state = told(told(state, "persisting", **about(step)), "persist_failed", **about(step), **late)
    assert len(state.checkpoints) == MAX_FAILURES + 1
    assert state.checkpoints[0].status is Status.COMPLETE
    assert {one.status for one in state.checkpoints[1:]} == {Status.FAILED, Status.TIMED_OUT}
    assert state.checkpoints[-1].reason == "slow"
    assert not any(one.status.is_restorable for one in state.checkpoints[1:])
    skipped = told(State(), "persist_skipped", **about(3), reason="gave way")
    assert (only(skipped).status, only(skipped).reason) == (Status.FAILED, "gave way")


def test_attempts_end_when_they_fail_or_the_next_begins():
    state = told(State(), "decision", 1.0, attempt=1, step=None, generation=None, path=None)
    state = told(state, "worker_group_failed", 2.0, last_step=40)
    state = told(state, "worker_group_failed", 2.0, last_step=41)
    state = told(state, "decision", 3.0, attempt=2, step=40, generation="1.0.40", path=None, tier=Tier.MEMORY)
    state = told(state, "decision", 4.0, attempt=3, step=30, generation="1.0.30", path=f"{RUN}/ray_jax_ckpt/c")
    state = told(state, "finished", 5.0, last_step=90)
    found = [(one.attempt, one.tier, one.path, one.ended, one.last_step) for one in state.attempts]
    assert found == [
        (1, None, None, "failed", 40),
        (2, "memory", None, "failed", None),
        (3, "storage", "ray_jax_ckpt/c", "finished", 90),
    ]
    assert state.finished_at_s == 5.0
    assert parse_state(state.to_bytes(), "x") == state


def test_what_is_reported_follows_rays_list():
    state = told(State(), "persisted", **about(1))
    state = told(state, "reported", path=f"{RUN}/checkpoint_a", metrics=encode({"loss": math.nan, "n": 1}))
    state = told(state, "reported", path=f"{RUN}/checkpoint_b", metrics={"loss": 2.0}, validation=True)
    assert [one.status for one in state.checkpoints] == [Status.COMPLETE, Status.COMPLETE, Status.VALIDATING]
    assert len(pending_of(state, "validated")) == 1
    listed = State(
        report_index=7,
        checkpoints=(
            Record(path="checkpoint_a", report_index=5, metrics={"loss": None, "n": 1}),
            Record(path="checkpoint_c", report_index=6, metrics={"loss": 1.0}, status=Status.VALIDATED),
        ),
    )
    manifest = Record(path="checkpoint_c", generation="2.0.9", step=9, num_bytes=3)
    state = with_rays_list(state, listed, {"checkpoint_c": manifest})
    found = {one.path: one for one in state.checkpoints}
    # What Ray has not listed yet stays, and NaN is what it was.
    assert set(found) == {"ray_jax_ckpt/checkpoints/c1", "checkpoint_a", "checkpoint_b", "checkpoint_c"}
    assert math.isnan(found["checkpoint_a"].metrics["loss"])
    assert (found["checkpoint_c"].step, found["checkpoint_c"].status) == (9, Status.VALIDATED)
    assert {found[name].origin for name in found if name.startswith("checkpoint_")} == {"report"}
    assert state.report_index == 7
    # What Ray lists no more is gone.
    state = with_rays_list(state, State(report_index=8), {})
    assert {one.path for one in state.checkpoints} == {"ray_jax_ckpt/checkpoints/c1", "checkpoint_b"}
    # The same again changes nothing.
    assert with_rays_list(state, State(report_index=8), {}) == state


@pytest.mark.parametrize("path", ["/elsewhere/checkpoint", "s3://other/checkpoint", "/runs/one/../two", "/runs/one"])
def test_what_was_reported_from_elsewhere_is_not_of_the_run(path: str):
    assert told(State(), "reported", path=path, metrics={}, validation=False) == State()


def test_what_it_does_not_know_changes_nothing():
    state = told(State(), "persisted", **about(1))
    assert told(state, "workers_ready", num_workers=2) is state
