"""Storage that throttles, hangs, fills up, keeps what is to go, or is not the same on all nodes."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from support import eventually

import ray_jax_ckpt as rjc
from persist.test_failures import check_all, state_of, take
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.storage.runs import FOLDER
from ray_jax_ckpt.testing import Fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, of its own."""
    path = tmp_path / "small disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr}")
    yield path
    # Lazily: the log of events may be open.
    subprocess.run(["umount", "-l", path], check=True)


def take_without_waiting(run, step: int) -> None:
    """For when there may be fewer stores than copies for a while, which `wait` warns of."""
    run.take_at(step, state_of(step))
    run.drain()


def directories(run) -> list[str]:
    return sorted(path.name for path in Path(run.path, FOLDER).iterdir() if path.is_dir())


def test_a_disk_that_fills_up_is_read_only_or_emptied_gets_the_next_one_when_it_is_well(run_of, small_disk):
    run = run_of(path=str(small_disk / "run"), every_n_steps=1)
    take(run, 1)
    run.await_steps(1)
    whole = directories(run)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 16 * 2**10))
    take(run, 2)
    eventually(lambda: "No space left" in run.warnings(), 60)
    # Nothing of it stays, and what was there is whole.
    eventually(lambda: directories(run) == whole, 30)
    check_all(run)
    (small_disk / "ballast").unlink()
    run.await_steps(1, 2)

    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    take(run, 3, 4)
    eventually(lambda: "Read-only file system" in run.warnings(), 60)
    assert rjc.latest() == 4
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    eventually(lambda: 4 in run.steps(), 60)
    check_all(run)

    shutil.rmtree(run.path)
    take(run, 5)
    run.await_steps(5)
    check_all(run)
    # What could not be noted meanwhile was, later.
    eventually(lambda: {event["step"] for event in run.events("persisted")} >= {1, 2, 4, 5}, 30)
    errors = " ".join(event["error"] for event in run.events("persist_failed"))
    for words in ("step-000000002", " bytes) could not be written", "No space left", "Read-only file system"):
        assert words in errors


def test_files_that_are_removed_under_way_make_no_checkpoint_and_cost_none(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1, num_to_keep=1)
    take(run, 1)
    run.await_steps(1)
    disk.says("held at w/c/")
    take(run, 2)
    eventually(Path(disk.path).with_name("met").exists, 60)
    (written,) = eventually(lambda: [*Path(run.path, FOLDER).glob("*-step-000000002-*/b/c/0")], 30)
    written.unlink()
    disk.says("")
    eventually(lambda: "have been written" in run.warnings(), 60)
    run.await_steps(2)
    check_all(run)


def test_storage_that_throttles_gets_every_checkpoint(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1, retries=8)
    disk.says("flaky")
    for step in range(1, 4):
        take(run, step)
        eventually(lambda step=step: step in run.steps(), 60)
    assert run.events("persist_failed") == []
    check_all(run)


def test_removals_that_take_long_or_fail_hold_up_no_checkpoint_and_are_made_up_for(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=1, num_to_keep=1)
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
    eventually(lambda: [event["step"] for event in run.events("remove_failed")] == [3], 60)
    assert run.steps() == [3, 4]
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
        while not done.wait(0.01):
            seen.append([info.step for info in rjc.checkpoints(run.path)])

    def next_is_written() -> bool:
        take_without_waiting(run, run.step + 1)
        time.sleep(0.5)
        return run.step in run.steps()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        armed = plan.arm(Fault("finish", "kill", step=2))
        take_without_waiting(run, 2)
        armed.wait(60)
        eventually(next_is_written, 90)
        take_without_waiting(run, run.step + 1)
        run.await_steps(run.step)
    finally:
        done.set()
        looking.join()
    assert seen
    assert all(seen)
    check_all(run)


def test_nodes_with_disks_of_their_own_are_named_at_the_start_and_leave_no_half_checkpoint(run_of, disk):
    run = run_of(filesystem=disk.of_each_node, every_n_steps=1)
    (told,) = eventually(lambda: run.events("storage_unfit"), 30)
    text = "is not the same directory on all nodes: of 2, "
    assert text in told["error"]
    assert run.nodes[0][0] in told["error"] or run.nodes[1][0] in told["error"]
    take(run, 1)
    (failed, *_) = eventually(lambda: run.events("persist_failed"), 60)
    assert text in failed["error"]
    assert "NFS" in failed["error"]
    assert not [*Path(run.path).rglob("manifest.json")]


def test_writing_takes_a_store_no_memory_beside_its_snapshots(run_of):
    run = run_of(every_n_steps=1000)
    size = 48 * 2**20
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
        while not done.wait(0.02):
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
