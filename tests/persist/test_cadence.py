"""The stores write snapshots to storage by themselves: when they are due, what lies there, what is removed again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import NoCheckpointError, UnsupportedLeafError
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing import assert_identical


def state_of(step: int) -> dict:
    return {
        "w": jnp.arange(1000.0) + step,
        "half": jnp.full((3, 5), step, jnp.bfloat16),
        "key": jax.random.key(step),
        "host": np.arange(step, step + 4),
        "step": step,
        "name": "small",
        "nothing": None,
        "empty": jnp.zeros((0, 3)),
    }


def data_of(rank: int) -> dict:
    return {"rank": rank, "big": b"x" * 10_000}


def test_due_snapshots_appear_on_storage_without_a_call(run_of):
    run = run_of(every_n_steps=10)
    for step in (5, 10, 15, 20):
        run.take_at(step, state_of(step))
        if step % 10 == 0:
            run.await_steps(*range(10, step + 1, 10))
    loaded = load(run.path_of(20), jax.tree.map(lambda x: x, state_of(0)))
    assert (loaded.step, loaded.source) == (20, "storage")
    assert_identical(loaded.state, state_of(20))
    run.await_events("persisted", "cadence", "cadence")


def test_data_and_metrics_of_every_rank_lie_beside_the_state_that_plain_orbax_reads(run_of):
    run = run_of(every_n_steps=1)
    found = run.all_ranks(
        lambda rank: rjc.snapshot(
            1, state_of(1), data={"rank": rank, "big": b"x" * 10_000}, metrics={"loss": rank + 0.5}
        )
    )
    assert not [one for one in found if isinstance(one, BaseException)]
    run.await_steps(1)
    loaded = load(run.path_of(1), state_of(0))
    assert loaded.data_by_rank == {rank: data_of(rank) for rank in (0, 1)}
    assert loaded.metrics == {0: {"loss": 0.5}, 1: {"loss": 1.5}}
    code = """
import sys, jax, numpy as np
from orbax.checkpoint import v1
state = v1.load(sys.argv[1])
assert "ray_jax_ckpt" not in sys.modules
np.testing.assert_array_equal(state["w"], np.arange(1000.0) + 1)
assert state["half"].dtype == "bfloat16" and state["half"].shape == (3, 5)
assert (jax.random.key_data(state["key"]) == jax.random.key_data(jax.random.key(1))).all()
np.testing.assert_array_equal(state["host"], np.arange(1, 5))
assert (state["step"], state["name"], state["nothing"]) == (1, "small", None)
print("ok")
"""
    found = subprocess.run([sys.executable, "-c", code, run.path_of(1)], capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == "ok", found.stderr


def test_superfluous_checkpoints_are_removed_once_the_new_one_is_there(run_of):
    run = run_of(every_n_steps=1, num_to_keep=1, score_attribute="loss", score_order="min")
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)):
        run.take_at(step, state_of(step), metrics={"loss": loss})
        eventually(lambda step=step: step in run.steps(), 30)
    # The best, and the newest.
    run.await_steps(2, 4)
    assert_identical(load(run.path_of(2), state_of(0)).state, state_of(2))


def test_the_last_snapshot_of_a_run_is_written_before_it_ends_also_to_slow_storage(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1000, max_concurrent=1)
    disk.says("0.1")
    run.take(state_of(1))
    run.take(state_of(2))
    run.drain()
    assert run.settle() == ""
    assert run.steps() == [2]
    run.await_events("persisted", "end of the run")
    assert "Deprecat" not in run.warnings()


def test_a_failure_flushes_the_newest_complete_snapshot(run_of):
    run = run_of()
    run.take(state_of(1))
    rjc.wait(30)
    # One rank alone: never complete.
    with run.as_rank(0):
        rjc.snapshot(2, state_of(2))
    ray.get(run.coordinator.failed.remote(), timeout=30)
    run.await_steps(1)
    run.await_events("persisted", "failure")


def test_without_a_cadence_nothing_is_written(run_of):
    run = run_of(on_failure=False)
    run.take(state_of(1))
    rjc.wait(30)
    ray.get(run.coordinator.failed.remote(), timeout=30)
    assert run.settle() == ""
    assert run.steps() == []


def test_a_tree_that_no_checkpoint_can_hold_is_refused_at_the_first_snapshot(run_of):
    run = run_of(every_n_steps=1)
    with run.as_rank(0), pytest.raises(UnsupportedLeafError, match=r"a\.b"):
        rjc.snapshot(1, {"a.b": jnp.ones(3), "a": {"b": jnp.zeros(3)}})


def test_another_driver_knows_what_is_there_and_prunes_it(run_of):
    run = run_of(every_n_steps=1, num_to_keep=2)
    for step in (1, 2):
        run.take_at(step, state_of(step))
        eventually(lambda step=step: step in run.steps(), 30)
    run.close()
    run.coordinator = None
    run.begin(copies=2)
    run.take_at(3, state_of(3))
    run.await_steps(2, 3)


def test_very_many_leaves_become_few_files_that_plain_orbax_reads(run_of):
    state = {f"leaf{number:04d}": jnp.full(4, number, jnp.float32) for number in range(1500)} | {"step": 3}
    run = run_of(every_n_steps=1)
    run.take(state)
    run.await_steps(1)
    path = run.path_of(1)
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    assert len(files) < 60
    assert_identical(load(path, state).state, state)
    code = """
import sys
from orbax.checkpoint import v1
state = v1.load(sys.argv[1])
assert len(state) == 1501 and state["step"] == 3
assert all((state[f"leaf{n:04d}"] == n).all() for n in range(1500))
print("ok")
"""
    found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == "ok", found.stderr


def test_anybody_can_list_what_is_there_and_restore_it(run_of):
    run = run_of(every_n_steps=1)
    for step in (1, 2):
        run.take_at(step, state_of(step), metrics={"loss": 1.0 / step})
        eventually(lambda step=step: step in run.steps(), 60)
    older, newer = rjc.checkpoints(run.path)
    assert (older.step, newer.step, newer.metrics) == (1, 2, {"loss": 0.5})
    # No whole checkpoint any more.
    next(Path(older.path).glob("w/c/*")).unlink()
    assert [one.step for one in rjc.checkpoints((run.path, run.filesystem))] == [2]
    restored = run.all_ranks(lambda rank: rjc.restore(newer, state_of(0)))
    for one in restored:
        assert_identical(one.state, state_of(2))
    with pytest.raises(NoCheckpointError, match="does not exist"):
        rjc.checkpoints(str(Path(run.path).parent / "nothing"))
