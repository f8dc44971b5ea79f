"""Tries to write a checkpoint never meet each other, and what storage does not show is not taken for nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pyarrow.fs
import pytest
import ray
from support import eventually

import ray_jax_ckpt as rjc
from persist import steered
from persist.test_failures import check_all, state_of, take
from persist.test_resume import decided, lose_memory
from ray_jax_ckpt.errors import NoCheckpointError, RestoreError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.stored import Stored
from ray_jax_ckpt.storage.reader import lacking, read_manifest


def directories(run) -> list[Path]:
    return sorted(Path(run.path, "ray_jax_ckpt", "checkpoints").iterdir())


def test_a_try_that_goes_on_after_it_was_given_up_harms_no_later_one(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=10, timeout_s=2, max_concurrent=1)
    disk.says("held")
    take(run, 10)
    failed = eventually(lambda: run.events("persist_failed"), 60)
    assert "timeout_s" in failed[0]["error"]
    # Memory does without it.
    take(run, 11)
    disk.says("")
    eventually(run.steps, 60)
    (step,) = run.steps()
    path = run.path_of(step)
    Path(disk.path).with_name("released").touch()
    # Long enough for those that were held: they only open a file, and learn that nobody wants it.
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert lacking(run.filesystem, path, read_manifest(run.filesystem, path)) == []
        time.sleep(0.1)
    check_all(run)


class HangsOnce(steered.Steered):
    """Whose first listing does not return before it is let go."""

    def __init__(self, control: str) -> None:
        super().__init__(control)
        self.let_go, self._listed = threading.Event(), False

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> list:
        first, self._listed = not self._listed, True
        if first:
            self.let_go.wait(60)
        return super().get_file_info_selector(selector)


def test_a_listing_that_hangs_costs_an_attempt_and_is_not_waited_for_again(tmp_path):
    handler = HangsOnce(str(tmp_path / "control"))
    stored = Stored(RunIdentity("run", str(tmp_path), pyarrow.fs.PyFileSystem(handler)))

    async def begin_two_attempts() -> None:
        await stored.look_back(0.2)
        with pytest.raises(RestoreError, match="not been listed yet"):
            await stored.newest(None, 5)
        await stored.look_back(20)
        assert await stored.newest(None, 5) is None
        handler.let_go.set()

    asyncio.run(begin_two_attempts())


def test_what_an_earlier_driver_did_not_finish_is_removed(run_of, tmp_path):
    folder = tmp_path / "run" / "ray_jax_ckpt" / "checkpoints"
    for name in (
        "attempt-0001.0-step-000000005-aaaaaaaa.orbax-checkpoint-tmp",
        "attempt-0001.0-step-000000006-bbbbbbbb",
    ):
        (folder / name / "ray_jax_ckpt").mkdir(parents=True)
        (folder / name / "ray_jax_ckpt" / "rank_0.json").write_text("{}")
    run = run_of(every_n_steps=10)
    take(run, 10)
    run.await_steps(10)
    eventually(lambda: [str(one) for one in directories(run)] == [run.path_of(10)], 30)


def test_a_run_does_not_start_afresh_because_storage_is_silent(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=10)
    take(run, 10)
    run.await_steps(10)
    lose_memory(run)
    disk.says("silent")
    for _ in range(2):
        with pytest.raises(ray.exceptions.RayTaskError, match="cannot be read") as caught:
            run.begin(copies=2)
        assert isinstance(caught.value.cause, RestoreError)
    disk.says("")
    run.begin(copies=2)
    assert decided(run).stored.path == run.path_of(10)


def test_what_is_silent_once_is_offered_again(run_of, disk):
    run = run_of(filesystem=disk.filesystem, every_n_steps=10)
    take(run, 10)
    run.await_steps(10)
    disk.says("silent")
    run.begin(copies=2)
    # Memory counts meanwhile.
    assert decided(run).located.generation.step == 10
    for store in run.stores().values():
        ray.kill(store)
    eventually(lambda: not run.stores(), 30)
    with pytest.raises(ray.exceptions.RayTaskError, match="cannot be read"):
        run.begin(copies=2)
    disk.says("")
    run.begin(copies=2)
    assert decided(run).stored.generation.step == 10


def test_what_else_is_not_found_says_nothing_of_the_runs_own_checkpoint(run_of):
    run = run_of(every_n_steps=10)
    take(run, 10)
    run.await_steps(10)
    lose_memory(run)
    run.begin(copies=2)
    found = run.all_ranks(lambda rank: rjc.restore("/no/such/pretrained", state_of(0)))
    assert all(isinstance(one, NoCheckpointError) for one in found)
    # A call in the order of the one before, if there was one.
    ray.get([session.coordinator.latest.remote() for session in run.sessions])
    run.begin(copies=2)
    assert decided(run).stored.generation.step == 10
