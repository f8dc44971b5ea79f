"""A snapshot as files: what `ray.train.report` copies of it, rank by rank, and what a copy of all of it is."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.fs
import pytest

import ray_jax_ckpt as rjc
from ray_jax_ckpt import worker
from ray_jax_ckpt.errors import IntegrityError, NotSupportedError, SnapshotLostError
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing import assert_identical

LOCAL = pyarrow.fs.LocalFileSystem()


@pytest.fixture
def run(reporting, monkeypatch):
    """The module's run, at the start of an attempt."""
    for name in ("current", "current_or_none"):
        monkeypatch.setattr(worker, name, reporting.current)
    begin(reporting)
    return reporting


def begin(run) -> None:
    run.begin(copies=2)
    # What an earlier attempt left is not to be asked for.
    for session in run.sessions:
        session.restores += 1


def state_of(rank: int = 0) -> dict:
    return {
        "w": jnp.arange(1000.0),
        "key": jax.random.key(3),
        "mine": np.full(5, rank),
        "step": 7,
        "name": "small",
        "empty": jnp.zeros((0, 3)),
    }


def data_of(rank: int) -> dict:
    return {"rank": rank, "big": bytes([rank]) * 10_000}


def handles(run, **options):
    run.step += 1
    found = run.all_ranks(
        lambda rank: rjc.snapshot(run.step, state_of(rank), data=data_of(rank), force=True, **options)
    )
    assert not [one for one in found if isinstance(one, BaseException)], found
    return found


def copied(checkpoints, target: Path) -> Path:
    """What Ray does with the checkpoints that ranks report: copies each one's files to one place, at the same time."""
    target.mkdir()

    def copy(one):
        pyarrow.fs.copy_files(
            one.path, str(target), source_filesystem=one.filesystem, destination_filesystem=LOCAL, use_threads=True
        )

    with ThreadPoolExecutor(len(checkpoints)) as pool:
        list(pool.map(copy, checkpoints))
    return target


def test_the_ranks_shares_together_are_the_checkpoint(run, tmp_path):
    target = copied(handles(run, metrics={"loss": 0.5}), tmp_path / "all")
    verify(LOCAL, str(target))
    for rank in (0, 1):
        loaded = load(str(target), state_of(), rank=rank, world_size=2)
        assert_identical(loaded.state, state_of(rank))
        assert loaded.data_by_rank == {0: data_of(0), 1: data_of(1)}
        assert (loaded.step, loaded.metrics[0]) == (1, {"loss": 0.5})


def test_very_many_arrays_are_few_files(run, tmp_path):
    def many(rank):
        rows = {f"leaf_{n}": jnp.full(4, n, jnp.float32) for n in range(2_100)}
        return state_of(rank) | {"rows": rows, "own_rows": [np.full(3, rank * 10_000 + n) for n in range(3)]}

    run.step += 1
    kept = run.all_ranks(lambda rank: rjc.snapshot(run.step, many(rank), force=True))
    target = copied(kept, tmp_path / "all")
    assert len([path for path in target.rglob("*") if path.is_file()]) < 100
    verify(LOCAL, str(target))
    for rank in (0, 1):
        assert_identical(load(str(target), many(rank), rank=rank, world_size=2).state, many(rank))
    with kept[1].as_directory() as directory:
        verify(LOCAL, directory)


def test_one_share_alone_is_no_checkpoint(run, tmp_path):
    first, second = handles(run)
    with pytest.raises(rjc.errors.CheckpointError):
        load(str(copied([second], tmp_path / "second")), state_of(), world_size=2)
    with pytest.raises(rjc.errors.CheckpointError):
        load(str(copied([first], tmp_path / "first")), state_of(), world_size=2)


def test_a_directory_of_a_handle_is_the_whole_checkpoint(run, tmp_path):
    first, second = handles(run)
    with second.as_directory() as directory:
        verify(LOCAL, directory)
        assert_identical(load(directory, state_of(), rank=1, world_size=2).state, state_of(1))
    path = first.to_directory(tmp_path / "copy")
    verify(LOCAL, str(path))


def test_files_are_listed_as_a_filesystem_lists_them(run):
    first, _ = handles(run)
    files, base = first.filesystem, first.path
    selector = pyarrow.fs.FileSelector(base, recursive=True)
    listed = {info.path: info for info in files.get_file_info(selector)}
    assert listed[f"{base}/ray_jax_ckpt"].type == pyarrow.fs.FileType.Directory
    manifest = listed[f"{base}/ray_jax_ckpt/manifest.json"]
    assert manifest.size == len(files.open_input_stream(manifest.path).read())
    top = files.get_file_info(pyarrow.fs.FileSelector(base))
    assert {info.path for info in top} == {path for path in listed if "/" not in path.removeprefix(f"{base}/")}
    assert files.get_file_info(f"{base}/nothing").type == pyarrow.fs.FileType.NotFound
    assert files.get_file_info(base).type == pyarrow.fs.FileType.Directory
    with pytest.raises(FileNotFoundError):
        files.open_input_stream(f"{base}/nothing")
    with pytest.raises(FileNotFoundError):
        files.get_file_info(pyarrow.fs.FileSelector(f"{base}/nothing"))
    with pytest.raises(NotSupportedError, match="can only be read"):
        files.delete_file(f"{base}/w/zarr.json")


def test_a_kept_snapshot_is_copied_after_newer_ones_and_another_is_lost(run, tmp_path):
    kept = handles(run)
    for _ in range(4):
        run.take(state_of())
    run.drain()
    rjc.wait(30)
    verify(LOCAL, str(copied(kept, tmp_path / "kept")))
    run.step += 1
    fleeting = run.all_ranks(lambda rank: rjc.snapshot(run.step, state_of(rank)))
    for _ in range(3):
        run.take(state_of())
    run.drain()
    rjc.wait(30)
    with pytest.raises((SnapshotLostError, OSError), match="force=True"):
        copied(fleeting, tmp_path / "lost")


def test_a_state_that_no_checkpoint_can_hold_stays_in_memory_only(run, caplog):
    ambiguous = {"a.b": jnp.ones(3), "a": {"b": jnp.zeros(3)}}
    run.step += 1
    first, _ = run.all_ranks(lambda rank: rjc.snapshot(run.step, ambiguous, force=True))
    assert "not reported as checkpoints" in caplog.text
    with pytest.raises(rjc.errors.NotSupportedError, match="cannot be written as a checkpoint"):
        first.filesystem.get_file_info(first.path)
    found = run.all_ranks(lambda rank: rjc.restore(first, ambiguous).state)
    for state in found:
        assert_identical(state, ambiguous)


def test_a_handle_travels_without_its_files(run):
    first, _ = handles(run)
    copy = pickle.loads(pickle.dumps(first))
    assert (copy.generation, copy.metrics) == (first.generation, first.metrics)
    with pytest.raises(NotSupportedError, match="only in the train function"):
        copy.to_directory()
    for state in run.all_ranks(lambda rank: rjc.restore(copy, state_of(rank)).state):
        assert_identical({**state, "mine": None}, {**state_of(), "mine": None})


def test_shares_of_two_attempts_in_one_place_are_never_one_checkpoint(run, tmp_path):
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
    begin(run)
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
