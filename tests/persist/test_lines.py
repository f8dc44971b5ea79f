"""Which steps count after training went back: attempts, restores and places keep apart what has the same step."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow.fs
import pytest
import ray
import ray.train
import steered
import unruly
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError, RestoreTimeoutError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing import assert_identical
from ray_jax_ckpt.testing.live import LiveRun

LOCAL = pyarrow.fs.LocalFileSystem()


@pytest.fixture
def control(tmp_path):
    for module in (steered, unruly):
        ray.cloudpickle.register_pickle_by_value(module)
    (tmp_path / "control").write_text("")
    yield tmp_path / "control"
    (tmp_path / "control").write_text("")
    for module in (steered, unruly):
        ray.cloudpickle.unregister_pickle_by_value(module)


def state_of(step: int, line: int = 0) -> dict:
    return {"w": jnp.arange(1000.0) + step, "line": line}


def persisted(run, *steps: int, line: int = 0) -> None:
    for step in steps:
        run.take_at(step, state_of(step, line), data={"position": step})
        eventually(lambda step=step: step in run.steps(), 60)


def lose_memory(run) -> None:
    """Every store of the run dies, and its coordinator with the driver."""
    run.close()
    eventually(lambda: not fleet.living_stores(run.run), 30)
    run.coordinator = None


def stored(run):
    return run.sessions[0].decision.stored


def restore_all(run, place, template=None, **options):
    checkpoint = ray.train.Checkpoint(place.path, filesystem=place.filesystem)
    return run.all_ranks(lambda rank: rjc.restore(checkpoint, template or state_of(0), **options))


def test_a_step_whose_checkpoint_was_never_finished_is_not_listed_and_is_written_again(run_of, control):
    filesystem = pyarrow.fs.PyFileSystem(unruly.Unruly(str(control)))
    run = run_of(filesystem=filesystem, every_n_steps=5, max_concurrent=1)
    persisted(run, 5)
    control.write_text("5")
    run.take_at(10, state_of(10))
    run.drain()
    begun = Path(run.path, "ray_jax_ckpt", "checkpoints", "attempt-0001.0-step-000000010")
    eventually(begun.exists, 30)
    lose_memory(run)
    control.write_text("")
    assert [info.step for info in rjc.checkpoints((run.path, filesystem))] == [5]
    run.begin(copies=2)
    assert stored(run).generation.step == 5
    for restored in restore_all(run, stored(run)):
        assert (restored.step, restored.data) == (5, {"position": 5})
    # Below it, and the same again, with other values.
    for step in (6, 8, 9):
        run.take_at(step, state_of(step, line=1))
    persisted(run, 10, line=1)
    assert run.steps() == [5, 10]
    assert_identical(load((run.path_of(10), filesystem), state_of(0), world_size=2).state, state_of(10, line=1))
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


def test_a_rank_that_does_not_come_back_from_storage_is_named_with_what_it_does(run_of, control):
    run = run_of(every_n_steps=10)
    persisted(run, 10)
    path = run.path_of(10)
    slow = pyarrow.fs.PyFileSystem(unruly.Unruly(str(control)))

    def wait_for_it() -> str:
        with run.as_rank(0), pytest.raises(RestoreTimeoutError, match=r"rank 0 waited 1 s for ranks \[1\]") as caught:
            rjc.restore(path, state_of(0), timeout_s=1)
        return str(caught.value)

    with run.as_rank(1), pytest.raises(NoCheckpointError):
        rjc.restore(f"{path}-not", state_of(0))
    assert "rank 1 failed to restore (NoCheckpointError" in wait_for_it()
    control.write_text("reads later")
    with ThreadPoolExecutor(1) as pool:

        def read_for_long() -> None:
            with run.as_rank(1):
                rjc.restore((path, slow), state_of(0), timeout_s=20)

        reading = pool.submit(read_for_long)
        assert eventually(lambda: (said := wait_for_it()) and "rank 1 began to restore" in said)
        control.write_text("")
        # When it is done it may find the other one gone, or waiting.
        assert isinstance(reading.exception(30), RestoreTimeoutError | None)


def test_shares_of_two_attempts_in_one_place_are_never_one_checkpoint(run_of, tmp_path):
    run = run_of(persists=False)

    def of(rank: int, line: int) -> dict:
        return {"w": jnp.arange(1000.0) + line, "mine": np.full(5, 10 * line + rank), "line": line}

    def shares(line: int):
        run.step = 0
        return run.all_ranks(lambda rank: rjc.snapshot(1, of(rank, line), force=True))

    def report(one, name: str) -> str:
        """As Ray copies what a rank reports."""
        target = tmp_path / name
        target.mkdir(exist_ok=True)
        pyarrow.fs.copy_files(one.path, str(target), source_filesystem=one.filesystem, destination_filesystem=LOCAL)
        return str(target)

    first, second = shares(1)
    for name in ("mixed", "whole"):
        report(second, name)
    report(first, "other")
    run.begin(copies=2)
    for one in run.sessions:
        one.restores += 1
    new_first, new_second = shares(2)
    # Rank 1 of the first attempt, and rank 0 of the second, which had no more.
    mixed, other = report(new_first, "mixed"), report(new_second, "other")
    for path in (mixed, other):
        with pytest.raises(IntegrityError):
            load(path, of(0, 0), rank=1, world_size=2)
        with pytest.raises(IntegrityError):
            verify(LOCAL, path)
    # Both of the second over what the first has left.
    report(new_first, "whole")
    path = report(new_second, "whole")
    verify(LOCAL, path)
    for rank in (0, 1):
        assert_identical(load(path, of(0, 0), rank=rank, world_size=2).state, of(rank, 2))
