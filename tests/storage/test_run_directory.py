"""A run's directory, given to what takes one: its checkpoints by age, and what is said of other directories."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from written import hold, write

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import ConfigError, NoCheckpointError
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.records import Record, State
from ray_jax_ckpt.storage.run_directory import RAY_STATE, is_run
from ray_jax_ckpt.storage.state import StateFile

WRITTEN = "ray_jax_ckpt/checkpoints/attempt-0001.0-step-{:09d}"
REPORTED = "checkpoint_2026-11-29_10-00-{:02d}.000000"


def made(run: Path, path: str, step: int, index: int | None = None) -> Record:
    write(hold({"w": np.full(4, float(step))}), run / path, run="run", step=step)
    origin = "persist" if index is None else "report"
    return Record(
        path=path, generation=str(Generation(1, 0, step)), step=step, origin=origin, report_index=index, metrics={}
    )


def save(run: Path, *records: Record) -> None:
    StateFile(pyarrow.fs.LocalFileSystem(), str(run)).save(State(run="run", checkpoints=records))


def list_by_ray(run: Path, *paths: str) -> None:
    results = [{"version": 0, "checkpoint_dir_name": path, "metrics": {}} for path in paths]
    document = {
        "ray_version": "2.60.0",
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(paths))),
        "latest_checkpoint_result": results[-1],
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(paths),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
    (run / RAY_STATE).write_text(json.dumps(document))


def restored(place: Any) -> float:
    return float(rjc.restore(str(place)).state["w"][0])


# What a run's directory stands for.


def test_a_run_that_only_reported_stands_for_its_newest_report(tmp_path: Path):
    save(tmp_path, *(made(tmp_path, REPORTED.format(n), n, n) for n in (3, 4)))
    assert restored(tmp_path) == 4
    with rjc.OrbaxCheckpointHandler() as handler:
        assert handler.restore(tmp_path)["w"].tolist() == [4] * 4


@pytest.mark.parametrize(("written", "reported", "newest"), [(5, 7, 7), (9, 7, 9)])
def test_the_newest_counts_whoever_wrote_it(tmp_path: Path, written: int, reported: int, newest: int):
    save(
        tmp_path,
        made(tmp_path, WRITTEN.format(written), written),
        made(tmp_path, REPORTED.format(1), reported, 0),
    )
    assert restored(tmp_path) == newest == rjc.checkpoints(tmp_path)[-1].step


def test_a_newest_one_that_lacks_a_file_is_passed_over(tmp_path: Path):
    save(tmp_path, made(tmp_path, WRITTEN.format(5), 5), made(tmp_path, REPORTED.format(1), 7, 0))
    next((tmp_path / REPORTED.format(1) / "w" / "c").iterdir()).unlink()
    assert restored(tmp_path) == 5


def test_a_run_without_checkpoints_is_said_to_have_none(tmp_path: Path):
    save(tmp_path)
    with pytest.raises(NoCheckpointError, match=r"directory of a run, and there is no checkpoint.*status='all'"):
        rjc.restore(str(tmp_path))
    with rjc.OrbaxCheckpointHandler() as handler:
        for metadata_only in (False, True):
            with pytest.raises(NoCheckpointError, match="directory of a run, and there is no checkpoint"):
                handler.restore(tmp_path, metadata_only=metadata_only)


def test_what_was_saved_by_hand_in_a_runs_directory_counts_where_the_run_has_none(tmp_path: Path):
    save(tmp_path)
    with rjc.OrbaxCheckpointHandler() as handler:
        handler.save(tmp_path, {"w": np.full(4, 2.0)}, step=30)
    assert restored(tmp_path) == 2
    save(tmp_path, made(tmp_path, REPORTED.format(1), 7, 0))
    assert restored(tmp_path) == 7


def test_a_folder_of_the_same_name_makes_no_checkpoint(tmp_path: Path):
    (tmp_path / "ray_jax_ckpt").mkdir()
    (tmp_path / "ray_jax_ckpt" / "notes.txt").write_text("x")
    with pytest.raises(NoCheckpointError, match=r"There is no checkpoint at .*nor a run\.$"):
        rjc.restore(str(tmp_path))
    save(tmp_path / "gpt")
    with pytest.raises(NoCheckpointError, match=r"There are runs below it: gpt\.$"):
        rjc.restore(str(tmp_path))


def test_names_that_others_give_to_their_steps_make_no_run(tmp_path: Path):
    write(hold({"w": np.full(4, 3.0)}), tmp_path / "checkpoint_000007", run="run", step=7)
    assert not is_run(pyarrow.fs.LocalFileSystem(), str(tmp_path))
    (tmp_path / REPORTED.format(1)).mkdir()
    assert is_run(pyarrow.fs.LocalFileSystem(), str(tmp_path))


def test_a_file_is_called_one(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NoCheckpointError, match="file is a file, and a checkpoint is a directory"):
        rjc.restore(str(tmp_path / "file"))


# What is lost.


def test_what_is_gone_is_listed_as_lost_in_its_place(tmp_path: Path):
    save(
        tmp_path,
        *(made(tmp_path, REPORTED.format(n), n, n) for n in (1, 3)),
        *(made(tmp_path, WRITTEN.format(n), n) for n in (2, 4, 5)),
    )
    list_by_ray(tmp_path, *(REPORTED.format(n) for n in (1, 3)))
    for path in (REPORTED.format(3), WRITTEN.format(2), WRITTEN.format(4)):
        shutil.rmtree(tmp_path / path)
    found = rjc.checkpoints(tmp_path, status="all")
    assert [(one.step, one.status, one.reason) for one in found] == [
        (1, "complete", ""),
        (2, "lost", "it is gone"),
        (3, "lost", "it is gone"),
        (4, "lost", "it is gone"),
        (5, "complete", ""),
    ]
    assert [one.step for one in rjc.checkpoints(tmp_path)] == [1, 5]


def test_a_lost_report_of_which_only_ray_knows_is_where_it_was(tmp_path: Path):
    for n in (1, 3):
        made(tmp_path, REPORTED.format(n), n, n)
    list_by_ray(tmp_path, *(REPORTED.format(n) for n in (1, 2, 3, 4)))
    found = rjc.checkpoints(tmp_path, status="all")
    assert [(one.step, one.status) for one in found] == [
        (1, "complete"),
        (None, "lost"),
        (3, "complete"),
        (None, "lost"),
    ]


def test_what_ray_has_removed_is_not_lost(tmp_path: Path):
    records = [made(tmp_path, REPORTED.format(n), n, n) for n in (1, 2)]
    save(tmp_path, *records)
    list_by_ray(tmp_path, REPORTED.format(2))
    shutil.rmtree(tmp_path / REPORTED.format(1))
    assert [one.step for one in rjc.checkpoints(tmp_path, status="all")] == [2]


# What is no run.

TAKERS = [rjc.checkpoints, rjc.rebuild_ray_state, rjc.remove_unfinished]


@pytest.mark.parametrize("take", TAKERS)
def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path, take: Any):
    with pytest.raises(NoCheckpointError, match=r"nothing is no directory of a run: it does not exist.*<storage_path>"):
        take(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NoCheckpointError, match="it is a file"):
        take(tmp_path / "file")


@pytest.mark.parametrize("take", TAKERS)
def test_a_directory_that_is_no_runs_is_warned_of(tmp_path: Path, take: Any, caplog: Any):
    save(tmp_path / "gpt", made(tmp_path / "gpt", WRITTEN.format(5), 5))
    with caplog.at_level(logging.WARNING):
        assert take(tmp_path / "gpt") != [] or take is not rjc.checkpoints
        assert caplog.text == ""
        assert take(tmp_path) == []
        assert take(tmp_path / "gpt" / WRITTEN.format(5)) == []
    assert "There are runs below it: gpt." in caplog.text
    assert "step-000000005 is a checkpoint, and no directory of a run" in caplog.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: rjc.checkpoints(5), r"5 is no run\. .*the Result of its fit"),
        (lambda run: rjc.checkpoints(run, consistency="committed", timeout_s="x"), "timeout_s takes .*got 'x'"),
        (lambda run: rjc.rebuild_ray_state(run, score_order="maximum"), "score_order 'max' or 'min'"),
        (lambda run: rjc.rebuild_ray_state(run, score_attribute=3), "the name of a metric or None"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tmp_path: Path, call: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        call(tmp_path)
