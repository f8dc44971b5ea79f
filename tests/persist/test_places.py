"""Where stores write: a real S3 server, fsspec's filesystems; and why, when nodes are preempted or a run ends."""

from __future__ import annotations

import asyncio
import time

import fsspec
import jax.numpy as jnp
import pyarrow.fs
import pytest
import ray
from servers import make_bucket, s3, s3_server
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import PersistError
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing import assert_identical


def state_of(step: int) -> dict:
    return {"w": jnp.arange(5000.0) + step, "step": step, "name": "small"}


def check(run, step: int) -> None:
    (info,) = [one for one in rjc.checkpoints((run.path, run.filesystem)) if one.step == step]
    verify(run.filesystem, info.path)
    assert_identical(load((info.path, run.filesystem), state_of(0), world_size=2).state, state_of(step))


def test_stores_write_to_s3_and_a_new_group_restores_from_there(run_of):
    with s3_server() as port:
        make_bucket(port, "bucket")
        run = run_of(filesystem=s3(port), path="bucket/runs/one", every_n_steps=1)
        run.take(state_of(1))
        eventually(lambda: run.steps() == [1], 60)
        check(run, 1)
        # What was reported: the ranks' shares, copied at the same time.
        run.step = 2
        handles = run.all_ranks(lambda rank: rjc.snapshot(2, state_of(2), force=True))

        def copy(rank: int) -> None:
            one, target = handles[rank], {"destination_filesystem": run.filesystem, "use_threads": False}
            pyarrow.fs.copy_files(one.path, "bucket/runs/reported", source_filesystem=one.filesystem, **target)

        assert run.all_ranks(copy) == [None, None]
        verify(run.filesystem, "bucket/runs/reported")
        restored = run.all_ranks(lambda rank: rjc.restore(("bucket/runs/reported", run.filesystem), state_of(0)))
        for one in restored:
            assert_identical(one.state, state_of(2))


def test_a_missing_bucket_is_a_failure_that_says_so(run_of):
    with s3_server() as port:
        run = run_of(filesystem=s3(port), path="nothing/runs/one", every_n_steps=1)
        run.take(state_of(1))
        run.drain()
        problem = run.settle()
    assert "step 1 could not be written to nothing/runs/one" in problem
    assert "NO_SUCH_BUCKET" in problem or "bucket does not exist" in problem


def test_stores_write_to_a_filesystem_of_fsspec(run_of, tmp_path):
    handler = pyarrow.fs.FSSpecHandler(fsspec.filesystem("file"))
    run = run_of(filesystem=pyarrow.fs.PyFileSystem(handler), path=str(tmp_path / "run"), every_n_steps=1)
    run.take(state_of(1))
    eventually(lambda: run.steps() == [1], 60)
    check(run, 1)


def test_what_is_taken_for_a_preemption_is_written(run_of):
    run = run_of(on_failure=False, snapshots={"every_n_steps": 10**6})
    run.all_ranks(lambda rank: rjc.snapshot(1, state_of(1)))
    ray.get(run.coordinator.preempted.remote((1,), int((time.time() + 60) * 1000)), timeout=30)

    def step() -> bool:
        run.step += 1
        return any(run.all_ranks(lambda rank: rjc.snapshot(run.step, state_of(run.step))))

    run.step = 1
    eventually(step, 60)
    taken = run.step
    run.await_steps(taken)
    run.await_events("persisted", "preemption")
    check(run, taken)


def test_a_run_ends_with_an_error_if_its_last_snapshot_is_not_on_storage(run_of, disk):
    run = run_of(every_n_steps=100, filesystem=disk.filesystem)
    disk.says("full")
    run.take(state_of(1))
    run.drain()
    manager = rjc.CheckpointManager(persist=run.persist)
    # Nothing has been started: there is nothing to wait for.
    asyncio.run(manager.before_controller_shutdown())
    manager._coordinator = run.coordinator
    with pytest.raises(PersistError, match=r"Training has ended, and not all of it is on storage: step 1 could not"):
        asyncio.run(manager.before_controller_shutdown())
