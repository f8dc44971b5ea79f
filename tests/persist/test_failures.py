"""Storage that is full, slow or forbids, and processes that die while they write: training goes on, nothing is lost."""

from __future__ import annotations

import functools
from pathlib import Path

import jax.numpy as jnp
import ray
from support import eventually

import ray_jax_ckpt as rjc
from persist import steered
from ray_jax_ckpt.errors import PersistError
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.storage.runs import FOLDER
from ray_jax_ckpt.testing import Fault, assert_identical


def state_of(step: int) -> dict:
    return {"w": jnp.arange(5000.0) + step, "b": jnp.full(7, step), "step": step}


def take(run, *steps: int) -> None:
    for step in steps:
        run.take_at(step, state_of(step))
        run.drain()
        rjc.wait(30)


def check_all(run) -> None:
    """What is listed restores, bit for bit."""
    for info in rjc.checkpoints((run.path, run.filesystem)):
        verify(run.filesystem, info.path)
        assert_identical(load((info.path, run.filesystem), state_of(0), world_size=2).state, state_of(info.step))


def test_a_full_disk_costs_checkpoints_and_not_the_training(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1)
    take(run, 1)
    run.await_steps(1)
    disk.says("full")
    take(run, 2, 3, 4)
    failed = eventually(lambda: run.events("persist_failed"), 60)
    assert "No space left" in failed[0]["error"]
    assert run.steps() == [1]
    disk.says("")
    eventually(lambda: 4 in run.steps(), 60)
    check_all(run)
    # At the end of the run it is said what is not on storage.
    disk.says("full")
    take(run, 5)
    problem = run.settle()
    assert "step 5 could not be written" in problem
    assert "No space left" in problem
    assert 5 not in run.steps()


def test_enough_failures_fail_the_training_if_the_user_wants_that(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1, fail_after=1)
    disk.says("denied")
    take(run, 1)
    failed = eventually(lambda: run.events("persist_failed"), 60)
    assert "Permission denied" in failed[0]["error"]
    assert run.steps() == []

    def raised() -> str:
        run.step += 1
        found = run.all_ranks(lambda rank: rjc.snapshot(run.step, state_of(run.step)))
        return "; ".join(str(one) for one in found if isinstance(one, PersistError))

    assert "PersistConfig.fail_after" in eventually(raised, 60)


def test_access_that_is_denied_is_tried_with_a_new_filesystem(run_of, disk):
    again = functools.partial(steered.pardoned, disk.path)
    run = run_of(filesystem=disk.filesystem, rebuild=again, every_n_steps=1)
    disk.says("denied")
    take(run, 1)
    run.await_steps(1)
    assert run.events("persist_failed") == []
    check_all(run)


def test_a_slow_upload_never_stops_snapshots(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=100, max_concurrent=1, on_failure=False)
    disk.says("3")
    take(run, 100)
    # Each in its turn, while the files of the first one are written one by one.
    take(run, 101, 102, 103, 104, 105)
    assert run.steps() == []
    assert run.events("persist_skipped") == []
    disk.says("")
    run.await_steps(100)
    check_all(run)


def test_an_upload_gives_way_to_a_snapshot_that_is_kept(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=100, max_concurrent=1)
    disk.says("2")
    take(run, 100, 101)
    run.step = 102
    handles = run.all_ranks(lambda rank: rjc.snapshot(102, state_of(102), force=True))
    take(run, 103, 104, 105)
    eventually(lambda: run.events("persist_skipped") or run.events("persist_failed"), 60)
    assert run.steps() == []
    disk.says("")
    for restored in run.all_ranks(lambda rank: rjc.restore(handles[rank], state_of(0))):
        assert_identical(restored.state, state_of(102))
    handles.clear()
    take(run, 200)
    eventually(lambda: 200 in run.steps(), 60)
    check_all(run)


def test_a_store_that_dies_while_it_writes_leaves_no_half_checkpoint(run_of, plan):
    run = run_of(every_n_steps=10)
    others = Path(run.path, FOLDER, "mine")
    others.mkdir(parents=True)
    take(run, 10)
    run.await_steps(10)
    for step, point in ((20, "persist"), (40, "persisted"), (60, "finish")):
        armed = plan.arm(Fault(point, "kill", step=step))
        take(run, step)
        armed.wait(60)
        take(run, step + 1)
        # What lies there of it counts for nothing, or it was written again.
        check_all(run)
        take(run, step + 10)
        eventually(lambda step=step: step + 10 in run.steps(), 90)
        check_all(run)
    assert 10 in run.steps()
    # It goes when a newer one is whole; what is of somebody else stays.
    eventually(lambda: len([*others.parent.iterdir()]) == len(run.steps()) + 1, 30)
    assert others.exists()


def test_a_coordinator_that_dies_while_stores_write_goes_on(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=10, max_concurrent=1)
    disk.says("1")
    take(run, 10)
    ray.kill(run.coordinator, no_restart=False)
    disk.says("")
    take(run, 11, 20)
    eventually(lambda: 20 in run.steps(), 90)
    check_all(run)
