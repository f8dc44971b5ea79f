"""What is said of a run's earlier drivers."""

from __future__ import annotations

import asyncio

import pyarrow.fs
import pytest

from ray_jax_ckpt.memory.history import RECENT_S, History, rival
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.storage.records import AttemptRecord, Driver, Record, State
from ray_jax_ckpt.storage.state import STATE, StateFile

NOW_S = 2e9
DRIVER = Driver(id="one", host="far-away", pid=4711, job_id="07", started_at_s=NOW_S - 5000)
ACTIVE = State(driver=DRIVER, attempts=(AttemptRecord(attempt=1, started_at_s=NOW_S - 60),))


def test_a_driver_that_may_train_on_another_cluster_is_named():
    said = rival(ACTIVE, {"here"}, NOW_S)
    assert "process 4711 on far-away (Ray job 07)" in said
    assert "60 s ago" in said
    # What was written since counts as well.
    written = ACTIVE.changed(checkpoints=(Record(path="a", created_at_s=NOW_S - 3),))
    assert "3 s ago" in rival(written, {"here"}, NOW_S)


@pytest.mark.parametrize(
    ("state", "now_s"),
    [
        (State(), NOW_S),
        (ACTIVE.changed(finished_at_s=NOW_S - 1), NOW_S),
        (ACTIVE.changed(attempts=(AttemptRecord(attempt=1, started_at_s=NOW_S - 60, ended="failed"),)), NOW_S),
        (ACTIVE.changed(driver=DRIVER.model_copy(update={"host": "here"})), NOW_S),
        (ACTIVE, NOW_S + RECENT_S),
    ],
    ids=["nobody", "ended well", "failed", "this cluster", "long ago"],
)
def test_a_driver_that_does_not_train_any_more_is_not_named(state, now_s):
    assert rival(state, {"here"}, now_s) == ""


def test_a_run_that_ended_well_is_not_taken_up_without_a_word(tmp_path, caplog):
    files = pyarrow.fs.LocalFileSystem()
    history = History(RunIdentity("run", str(tmp_path), files), "me")
    asyncio.run(history.load())
    history.warn_of_end(3)
    assert (history.state, caplog.text) == (None, "")
    finished = ACTIVE.changed(finished_at_s=1.75e9)
    StateFile(files, str(tmp_path)).save(finished)
    # This driver may have written the file by the time that it is read.
    StateFile(files, str(tmp_path)).save(finished.taken_over(Driver(id="me")))
    history = History(RunIdentity("run", str(tmp_path), files), "me")
    asyncio.run(history.load())
    history.warn_of_end(3)
    assert "ended well at 2025-06-15 15:06:40 UTC, and goes on now from step 3" in caplog.text
    assert "resume='never'" in caplog.text


def test_a_coordinator_that_is_started_again_finds_what_its_driver_has_decided(tmp_path):
    files = pyarrow.fs.LocalFileSystem()
    old, new = (Record(path=f"checkpoint_{n}", origin="report", created_at_s=NOW_S - n) for n in (9000, 10))
    anew = ACTIVE.changed(first_attempt=7, checkpoints=(old,))
    for name, state, expected in (
        ("before", ACTIVE.changed(checkpoints=(old,)), (0, False)),
        ("anew", anew, (7, False)),
        ("reported", anew.changed(checkpoints=(old, new)), (7, True)),
        ("another's", anew.changed(driver=DRIVER.model_copy(update={"id": "two"})), (0, False)),
    ):
        StateFile(files, str(tmp_path / name)).save(state)
        history = History(RunIdentity("run", str(tmp_path / name), files), "one")
        asyncio.run(history.load())
        assert (history.first_attempt, history.has_reported) == expected, name


def test_a_state_that_cannot_be_read_says_nothing(tmp_path):
    (tmp_path / "ray_jax_ckpt").mkdir()
    (tmp_path / "ray_jax_ckpt" / "state.json").write_text("{")
    history = History(RunIdentity("run", str(tmp_path), pyarrow.fs.LocalFileSystem()), "me")
    asyncio.run(history.load())
    assert history.state is None


def test_attempts_are_known_from_the_state_before_when_the_newest_is_damaged(tmp_path):
    files, attempts = pyarrow.fs.LocalFileSystem(), (AttemptRecord(attempt=4, started_at_s=NOW_S),)
    file = StateFile(files, str(tmp_path))
    for state in (ACTIVE.changed(attempts=attempts), ACTIVE.changed(attempts=attempts)):
        file.save(state)
    (tmp_path / STATE).write_text("{")
    history = History(RunIdentity("run", str(tmp_path), files), "me")
    assert history.latest_attempt == 0
    asyncio.run(history.load())
    assert history.latest_attempt == 4
