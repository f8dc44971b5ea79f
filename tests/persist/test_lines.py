"""Which steps count after training went back: attempts, restores and places keep apart what has the same step."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pyarrow.fs
import pytest
import ray.train
from support import eventually

import ray_jax_ckpt as rjc
from persist.test_resume import lose_memory
from ray_jax_ckpt.errors import NoCheckpointError, RestoreTimeoutError
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.storage.runs import FOLDER
from ray_jax_ckpt.testing import assert_identical
from ray_jax_ckpt.testing.live import LiveRun

LOCAL = pyarrow.fs.LocalFileSystem()


def state_of(step: int, line: int = 0) -> dict:
    return {"w": jnp.arange(1000.0) + step, "line": line}


def persisted(run, *steps: int, line: int = 0) -> None:
    for step in steps:
        run.take_at(step, state_of(step, line), data={"position": step})
        eventually(lambda step=step: step in run.steps(), 60)


def stored(run):
    return run.sessions[0].decision.stored


def restore_all(run, place, template=None, **options):
    checkpoint = ray.train.Checkpoint(place.path, filesystem=place.filesystem)
    return run.all_ranks(lambda rank: rjc.restore(checkpoint, template or state_of(0), **options))


def test_a_step_whose_checkpoint_was_never_finished_is_not_listed_and_is_written_again(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=5, max_concurrent=1)
    persisted(run, 5)
    disk.says("held at w/c/")
    run.take_at(10, state_of(10))
    run.drain()
    (begun,) = eventually(lambda: [*Path(run.path, FOLDER).glob("attempt-0001.0-step-000000010-*")], 30)
    lose_memory(run)
    disk.says("")
    assert [info.step for info in rjc.checkpoints((run.path, run.filesystem))] == [5]
    run.begin(copies=2)
    assert stored(run).generation.step == 5
    for restored in restore_all(run, stored(run)):
        assert (restored.step, restored.data) == (5, {"position": 5})
    # Below it, and the same again, with other values.
    for step in (6, 8, 9):
        run.take_at(step, state_of(step, line=1))
    persisted(run, 10, line=1)
    assert run.steps() == [5, 10]
    assert_identical(load((run.path_of(10), run.filesystem), state_of(0), world_size=2).state, state_of(10, line=1))
    eventually(lambda: not begun.exists(), 30)


def test_after_going_back_lower_steps_are_written_and_count_more_than_the_higher_ones_before(run_of):
    run = run_of(every_n_steps=5)
    persisted(run, 10, 20)
    back = run.path_of(10)
    for restored in run.all_ranks(lambda rank: rjc.restore(back, state_of(0))):
        assert restored.step == 10
    persisted(run, 15, line=1)
    lose_memory(run)
    run.begin(copies=2)
    assert stored(run).generation.step == 15
    for restored in restore_all(run, stored(run)):
        assert_identical(restored.state, state_of(15, line=1))


def test_a_run_is_found_where_it_is_at_each_resume_and_where_it_is_moved_to(run_of, tmp_path):
    filesystem = pyarrow.fs.SubTreeFileSystem(str(tmp_path), LOCAL)
    run = run_of(filesystem=filesystem, path="runs/a", every_n_steps=10)
    for step in (10, 20):
        persisted(run, step)
        lose_memory(run)
        run.begin(copies=2)
        assert stored(run).generation.step == step
        assert stored(run).path.startswith("runs/a/ray_jax_ckpt/")
    shutil.move(tmp_path / "runs" / "a", tmp_path / "elsewhere")
    moved = run_of(path=str(tmp_path / "elsewhere"), every_n_steps=10)
    for restored in restore_all(moved, stored(moved)):
        assert_identical(restored.state, state_of(20))


def test_when_every_copy_in_memory_is_bad_storage_is_restored_by_all_ranks(run_of):
    run = run_of(every_n_steps=10)
    persisted(run, 10)
    run.take_at(11, state_of(11))
    run.drain()
    rjc.wait(30)
    live = LiveRun(run.run)
    for rank in (0, 1):
        for step in live.held_steps(rank):
            live.damage(rank, step=step)
    run.begin(copies=2)
    assert run.sessions[0].decision.located is None
    assert stored(run).generation.step == 10
    for restored in restore_all(run, stored(run)):
        assert (restored.step, restored.source) == (10, "storage")
        assert_identical(restored.state, state_of(10))


def test_a_rank_that_does_not_come_back_from_storage_is_named_with_what_it_does(run_of, disk):
    run = run_of(every_n_steps=10)
    persisted(run, 10)
    path = run.path_of(10)

    def wait_for_it() -> str:
        with run.as_rank(0), pytest.raises(RestoreTimeoutError, match=r"rank 0 waited 1 s for ranks \[1\]") as caught:
            rjc.restore(path, state_of(0), timeout_s=1)
        return str(caught.value)

    with run.as_rank(1), pytest.raises(NoCheckpointError):
        rjc.restore(f"{path}-not", state_of(0))
    assert "rank 1 failed to restore (NoCheckpointError" in wait_for_it()
    disk.says("reads later")
    with ThreadPoolExecutor(1) as pool:

        def read_for_long() -> None:
            with run.as_rank(1):
                rjc.restore((path, disk.filesystem), state_of(0), timeout_s=20)

        reading = pool.submit(read_for_long)
        assert eventually(lambda: (said := wait_for_it()) and "rank 1 began to restore" in said)
        disk.says("")
        # When it is done it may find the other one gone, or waiting.
        assert isinstance(reading.exception(30), RestoreTimeoutError | None)
