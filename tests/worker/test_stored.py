"""Checkpoints on storage, restored in a train function and outside of one."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow.fs
import pytest
import ray.train

import ray_jax_ckpt as rjc
from ray_jax_ckpt import session
from ray_jax_ckpt.errors import ConfigError, DataStateError, NoSessionError, StepError

sys.path.append(os.fspath(Path(__file__).parents[1] / "storage"))
from written import hold, hold_group, write

STATE = {"w": jnp.arange(6.0), "n": np.arange(3)}
TEMPLATE = {"w": jnp.zeros(6), "n": np.zeros(3, np.int64)}


class Position:
    """A data iterator."""

    def __init__(self):
        self.at = 0

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("stored") / "c"
    write(hold(STATE, data={"value": {"at": 5}}, metrics={"loss": 0.5}), path)
    return str(path)


def assert_restored(restored):
    np.testing.assert_array_equal(restored.state["w"], STATE["w"])
    np.testing.assert_array_equal(restored.state["n"], STATE["n"])
    assert (restored.step, restored.source, restored.metrics) == (7, "storage", {"loss": 0.5})
    assert (restored.data, restored.data_by_rank) == ({"at": 5}, {0: {"at": 5}})


def test_outside_of_a_run_a_checkpoint_is_restored_by_this_process_alone(path):
    local = pyarrow.fs.LocalFileSystem()
    for place in [path, Path(path), f"file://{path}", (path, local), ray.train.Checkpoint(path)]:
        data = Position()
        assert_restored(rjc.restore(place, TEMPLATE, data=data))
        assert data.at == 5
    below = pyarrow.fs.SubTreeFileSystem(os.path.dirname(path), local)
    assert_restored(rjc.restore("c", TEMPLATE, filesystem=below))
    assert rjc.restore(path).state["n"].tolist() == [0, 1, 2]


def test_a_worker_that_does_not_know_its_decision_yet_restores_nothing(path, monkeypatch):
    monkeypatch.setattr(session, "_current", session.Wiring(types.SimpleNamespace(), rjc.SnapshotConfig()))
    with pytest.raises(NoSessionError, match="decision has not arrived"):
        rjc.restore(path, TEMPLATE)


def test_bad_arguments_are_refused(path):
    with pytest.raises(ConfigError, match="timeout_s takes a positive"):
        rjc.restore(path, timeout_s=0)
    with pytest.raises(ConfigError, match="filesystem= takes"):
        rjc.restore(path, filesystem="s3")


def test_data_of_another_number_of_processes_needs_somebody_who_divides_it(tmp_path):
    states = [{"value": {"at": rank}} for rank in range(2)]
    write(hold_group([STATE] * 2, data=states), tmp_path / "c")
    assert rjc.restore(tmp_path / "c", TEMPLATE).data is None
    with pytest.raises(DataStateError, match=r"2 processes.*cannot be handed to 1"):
        rjc.restore(tmp_path / "c", TEMPLATE, data=Position())
    data = Position()
    restored = rjc.restore(tmp_path / "c", TEMPLATE, data=data, reshard_data=lambda states, **_: states[1])
    assert (data.at, restored.data, len(restored.data_by_rank)) == (1, {"at": 1}, 2)


def test_in_a_run_a_restored_checkpoint_begins_a_new_line_of_steps(path, attempts):
    one = attempts.begin()
    rjc.snapshot(50, {"x": 1})
    with pytest.raises(StepError):
        rjc.snapshot(8, {"x": 1})
    assert_restored(rjc.restore(ray.train.Checkpoint(path), TEMPLATE))
    with pytest.raises(StepError, match="after step 7"):
        rjc.snapshot(6, {"x": 1})
    rjc.snapshot(8, {"x": 1})
    rjc.wait()
    # Newer by its line, not by its step.
    assert rjc.latest() == 8
    assert one.restores == 1
    assert attempts.begin().decision.located.generation.step == 8
