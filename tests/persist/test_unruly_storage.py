"""Storage that throttles, hangs, fills up, keeps what is to go, or is not the same on all nodes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import psutil
import pyarrow.fs
import pytest
import ray
import steered
import unruly
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.storage.runs import FOLDER
from ray_jax_ckpt.testing import Fault, assert_identical


class Disk:
    """A disk of the stores, and what it is told to do."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self.says("")

    def says(self, what: str) -> None:
        # At once, for whoever reads it.
        aside = self._control.with_suffix(".new")
        aside.write_text(what)
        aside.rename(self._control)

    def filesystem(self, kind: type[steered.Steered] = unruly.Unruly) -> pyarrow.fs.FileSystem:
        return pyarrow.fs.PyFileSystem(kind(str(self._control)))


@pytest.fixture
def disk(tmp_path):
    for module in (steered, unruly):
        ray.cloudpickle.register_pickle_by_value(module)
    found = Disk(tmp_path / "control")
    yield found
    found.says("")
    for module in (steered, unruly):
        ray.cloudpickle.unregister_pickle_by_value(module)


def state_of(step: int) -> dict:
    return {"w": jnp.arange(5000.0) + step, "b": jnp.full(7, step), "step": step}


def take(run, *steps: int) -> None:
    for step in steps:
        run.take_at(step, state_of(step))
        run.drain()
        rjc.wait(30)


def take_without_waiting(run, step: int) -> None:
    """For when there may be fewer stores than copies for a while, which `wait` warns of."""
    run.take_at(step, state_of(step))
    run.drain()


def check_all(run) -> None:
    """What is listed restores, bit for bit."""
    for info in rjc.checkpoints((run.path, run.filesystem)):
        verify(run.filesystem, info.path)
        assert_identical(load((info.path, run.filesystem), state_of(0), world_size=2).state, state_of(info.step))


def directories(run) -> list[str]:
    return sorted(path.name for path in Path(run.path, FOLDER).iterdir() if path.is_dir())


def test_storage_that_throttles_gets_every_checkpoint(run_of, disk):
    run = run_of(filesystem=disk.filesystem(), every_n_steps=1, retries=8)
    disk.says("flaky")
    for step in range(1, 6):
        take(run, step)
        eventually(lambda step=step: step in run.steps(), 60)
    assert run.events("persist_failed") == []
    check_all(run)


def test_storage_that_does_not_answer_costs_its_checkpoint_and_nothing_else(run_of, disk):
    run = run_of(filesystem=disk.filesystem(), every_n_steps=1, timeout_s=1)
    disk.says("20")
    take(run, 1)
    (failed, *_) = eventually(lambda: run.events("persist_failed"), 60)
    assert "timeout_s" in failed["error"]
    take(run, 2, 3)
    assert rjc.latest() == 3
    disk.says("")
    eventually(lambda: 3 in run.steps(), 60)
    check_all(run)


def test_a_directory_that_somebody_removed_is_made_again(run_of):
    run = run_of(every_n_steps=1)
    take(run, 1)
    run.await_steps(1)
    shutil.rmtree(Path(run.path, FOLDER))
    take(run, 2)
    run.await_steps(2)
    check_all(run)


def test_a_disk_that_fills_up_in_mid_write_keeps_the_last_checkpoint_and_nothing_of_the_next(run_of, disk):
    run = run_of(filesystem=disk.filesystem(), every_n_steps=1)
    take(run, 1)
    run.await_steps(1)
    whole = directories(run)
    disk.says("no room for w/c/")
    take(run, 2)
    (failed, *_) = eventually(lambda: run.events("persist_failed"), 60)
    assert "No space left" in failed["error"]
    assert "step-000000002" in failed["error"]
    assert " bytes) could not be written" in failed["error"]
    eventually(lambda: directories(run) == whole, 30)
    check_all(run)


def test_removals_that_take_long_or_fail_hold_up_no_checkpoint_and_are_made_up_for(run_of, disk):
    run = run_of(filesystem=disk.filesystem(), every_n_steps=1, num_to_keep=1)
    take(run, 1)
    run.await_steps(1)
    disk.says("removes later")
    for step in (2, 3):
        take(run, step)
        eventually(lambda step=step: step in run.steps(), 60)
    assert run.steps() == [1, 2, 3]
    disk.says("")
    run.await_steps(3)
    disk.says("keeps")
    take(run, 4)
    run.await_steps(3, 4)
    eventually(lambda: [event["step"] for event in run.events("remove_failed")] == [3], 60)
    disk.says("")
    take(run, 5)
    run.await_steps(5)
    eventually(lambda: len(directories(run)) == 1, 30)


def test_there_is_a_whole_checkpoint_at_every_moment(run_of, plan):
    run = run_of(every_n_steps=1, num_to_keep=1)
    take(run, 1)
    run.await_steps(1)
    seen: list[list[int]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append([info.step for info in rjc.checkpoints(run.path)])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        plan.arm(Fault("finish", "kill", step=3))
        for step in range(2, 6):
            take_without_waiting(run, step)
            eventually(lambda step=step: step == 3 or step in run.steps(), 90)
        eventually(lambda: run.steps() == [5], 90)
    finally:
        done.set()
        looking.join()
    assert all(seen)
    check_all(run)


def test_what_a_killed_writer_left_goes_when_a_newer_checkpoint_is_whole(run_of, plan):
    run = run_of(every_n_steps=10)
    others = Path(run.path, FOLDER, "mine")
    others.mkdir(parents=True)
    armed = plan.arm(Fault("finish", "kill", step=10))
    take_without_waiting(run, 10)
    armed.wait(60)
    (left,) = [name for name in directories(run) if name != "mine"]
    assert "step-000000010" in left
    take_without_waiting(run, 20)
    eventually(lambda: 20 in run.steps(), 90)
    take_without_waiting(run, 30)
    eventually(lambda: 30 in run.steps(), 90)
    eventually(lambda: left not in directories(run) and others.exists(), 30)
    assert len(directories(run)) == len(run.steps()) + 1
    check_all(run)


def test_nodes_with_disks_of_their_own_are_named_at_the_start_and_leave_no_half_checkpoint(run_of, disk):
    run = run_of(filesystem=disk.filesystem(unruly.PerNode), every_n_steps=1)
    (told,) = eventually(lambda: run.events("storage_unfit"), 30)
    text = "is not the same directory on all nodes: of 2 stores, those on "
    assert text in told["error"]
    assert run.nodes[0][0][:16] in told["error"] or run.nodes[1][0][:16] in told["error"]
    take(run, 1)
    (failed, *_) = eventually(lambda: run.events("persist_failed"), 60)
    assert text in failed["error"]
    assert "NFS" in failed["error"]
    assert not [*Path(run.path).rglob("manifest.json")]


def test_the_end_of_a_run_waits_for_slow_storage(run_of, disk):
    run = run_of(filesystem=disk.filesystem(), every_n_steps=1000, max_concurrent=1)
    disk.says("0.5")
    run.take_at(7, state_of(7))
    run.drain()
    assert run.settle() == ""
    assert run.steps() == [7]
    check_all(run)


def test_writing_takes_a_store_no_memory_beside_its_snapshots(run_of):
    run = run_of(every_n_steps=1000)
    size = 64 * 2**20
    pids = [ray.get(handle.pid.remote()) for handle in fleet.living_stores(run.run).values()]

    def taken() -> int:
        """What is not the buffers, which are shared with workers."""
        found = [psutil.Process(pid).memory_info() for pid in pids]
        return max(one.rss - one.shared for one in found)

    run.take_at(1, {"w": np.ones(size // 4, np.float32)})
    run.drain()
    rjc.wait(60)
    before, most, done = taken(), [], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            most.append(taken())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert run.settle() == ""
    finally:
        done.set()
        looking.join()
    assert run.steps() == [1]
    assert max(most) - before < size // 2
