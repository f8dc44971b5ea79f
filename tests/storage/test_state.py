"""The state of a run on storage: versions, damage, crashes, drivers that replace each other."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest
from dying import Dying, Killed
from hypothesis import given, settings
from hypothesis import strategies as st
from sinks import Sink
from written import hold, write

from ray_jax_ckpt.errors import NotSupportedError, StaleDriverError, StateError, StorageError
from ray_jax_ckpt.model import metrics as metrics_
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.saver import StateSaver
from ray_jax_ckpt.storage.state import (
    PREVIOUS,
    STATE,
    VERSION,
    AttemptRecord,
    Driver,
    Record,
    State,
    StateFile,
    parse_state,
)

LOCAL = pafs.LocalFileSystem()
OLD_STATES = Path(__file__).parent / "old_states"


def driver(name: str, started_at_s: float = 100.0) -> Driver:
    return Driver(id=name, host="here", pid=7, job_id="01", started_at_s=started_at_s)


def report(name: str, index: int, **fields: Any) -> Record:
    return Record(path=f"checkpoint_{name}", report_index=index, origin="report", **fields)


def example(**fields: Any) -> State:
    attempt = AttemptRecord(attempt=3, step=20, generation="2.0.20", tier="memory", ended="failed", last_step=40)
    return State(run="run", driver=driver("one"), report_index=4, attempts=(attempt,), **fields)


def file_of(path: Path) -> StateFile:
    return StateFile(LOCAL, str(path))


def persisted(run: Path, step: int, attempt: int = 1) -> str:
    """A checkpoint that the stores have written. Returns its path in the run."""
    name = f"ray_jax_ckpt/checkpoints/attempt-{attempt:04d}.0-step-{step:09d}-{step:08x}"
    write(hold({"w": np.arange(4.0)}), run / name, run="run", step=step)
    return name


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["NaN", "'NaN", "-Infinity", "''Infinity"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a.b/", max_size=3), inner, max_size=3),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@settings(deadline=None)
@given(values)
def test_metrics_come_back_from_json_as_they_were(value: Any):
    encoded = json.dumps(metrics_.encode(value), allow_nan=False)
    assert same(value, metrics_.decode(json.loads(encoded)))


@settings(deadline=None)
@given(st.dictionaries(st.text("ab", min_size=1), values, max_size=3))
def test_a_state_comes_back_as_it_was(metrics: dict[str, Any]):
    state = example(checkpoints=(report("a", 0, metrics=metrics, status=Status.TIMED_OUT, reason="slow"),))
    found = parse_state(state.to_bytes(), "x")
    assert same(found.model_dump(), state.model_dump())


def test_scores_are_finite_numbers_at_any_depth():
    metrics = {"loss": 2, "eval": {"loss": 1.5, "deep": {"x": 3}}, "eval.acc": 0.5, "bad": math.nan, "text": "9"}
    found = {name: metrics_.score_of(metrics, name) for name in ("loss", "eval.loss", "eval/deep.x", "eval.acc")}
    assert found == {"loss": 2, "eval.loss": 1.5, "eval/deep.x": 3, "eval.acc": 0.5}
    worst = ("bad", "text", "missing", "eval", "eval.missing")
    assert [metrics_.score_of({**metrics, "inf": math.inf}, name) for name in (*worst, "inf")] == [None] * 6
    assert metrics_.score_of({"big": 10**400}, "big") is None


def test_saved_and_loaded_with_the_one_before_beside_it(tmp_path: Path):
    path = persisted(tmp_path, 5)
    first, second = example(checkpoints=(Record(path=path, step=5),)), example().changed(report_index=9)
    file_of(tmp_path).save(first)
    assert file_of(tmp_path).load().state == first
    file_of(tmp_path).save(second.changed(checkpoints=first.checkpoints))
    loaded = file_of(tmp_path).load()
    assert (loaded.state.report_index, loaded.found, loaded.warning) == (9, "state", "")
    assert parse_state((tmp_path / PREVIOUS).read_bytes(), "x") == first
    assert {name for name in os.listdir(tmp_path / "ray_jax_ckpt") if name.startswith("state")} == {
        "state.json",
        "state.previous.json",
    }


def test_nothing_there_is_nothing_found(tmp_path: Path):
    loaded = file_of(tmp_path / "new").load()
    assert (loaded.found, loaded.warning, loaded.state) == ("none", "", State(run="new"))


@pytest.mark.parametrize("damage", ["half", "empty", "missing", "no state"])
def test_what_is_damaged_is_made_up_for_by_the_one_before(tmp_path: Path, damage: str, caplog: Any):
    paths = [persisted(tmp_path, step) for step in (5, 6)]
    file = file_of(tmp_path)
    file.save(example(checkpoints=(Record(path=paths[0], step=5),)))
    file.save(example(checkpoints=tuple(Record(path=path) for path in paths)))
    _damage(tmp_path / STATE, damage)
    loaded = file_of(tmp_path).load()
    assert loaded.found == "previous"
    assert {record.path for record in loaded.state.checkpoints} == set(paths)
    assert loaded.state.driver == driver("one")
    assert "the one before it" in loaded.warning
    assert loaded.warning in caplog.text


def _damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "no state": b'{"a": 1}'}[how])


@pytest.mark.parametrize("damage", ["half", "empty", "missing", "no state"])
def test_with_both_damaged_the_checkpoints_say_what_is_there(tmp_path: Path, damage: str):
    path = persisted(tmp_path, 5)
    name = "checkpoint_2026-11-29_10-00-00.000000"
    write(hold({"w": np.arange(4.0)}), tmp_path / name, run="run", step=8)
    (tmp_path / "checkpoint_of_somebody_else").mkdir()
    file = file_of(tmp_path)
    for _ in range(2):
        file.save(example())
    for each in (STATE, PREVIOUS):
        _damage(tmp_path / each, damage)
    loaded = file_of(tmp_path).load()
    assert loaded.found == "rebuilt"
    found = {record.path: (record.step, record.origin, record.report_index) for record in loaded.state.checkpoints}
    assert found == {path: (5, "persist", None), name: (8, "report", 0)}
    assert loaded.state.report_index == 1
    assert all(record.num_bytes and record.created_at_s for record in loaded.state.checkpoints)
    assert "made anew from 2 checkpoints" in loaded.warning
    assert ("are both missing" in loaded.warning) is (damage == "missing")
    assert ("damaged" in loaded.warning or "empty" in loaded.warning or "version" in loaded.warning) is (
        damage != "missing"
    )


def test_who_writes_keeps_what_was_damaged(tmp_path: Path):
    file = file_of(tmp_path)
    file.save(example())
    file.save(example(finished_at_s=1.0))
    (tmp_path / STATE).write_bytes(b"{half")
    file.save(example(finished_at_s=2.0))
    [kept] = (tmp_path / "ray_jax_ckpt").glob("state.damaged-*.json")
    assert kept.read_bytes() == b"{half"
    # The one before is still one that can be read.
    assert parse_state((tmp_path / PREVIOUS).read_bytes(), "x") == example()


def test_who_reads_changes_nothing(tmp_path: Path):
    persisted(tmp_path, 5)
    file_of(tmp_path).save(example())
    (tmp_path / STATE).write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    file_of(tmp_path).load()
    assert sorted(tmp_path.rglob("*")) == before


def test_listed_checkpoints_that_are_gone_are_dropped_and_unlisted_ones_found(tmp_path: Path):
    paths = [persisted(tmp_path, step) for step in (5, 6, 7)]
    failed = Record(path="ray_jax_ckpt/checkpoints/never", status=Status.FAILED, reason="full")
    file_of(tmp_path).save(example(checkpoints=(*(Record(path=path) for path in paths[:2]), failed)))
    shutil.rmtree(tmp_path / paths[0])
    loaded = file_of(tmp_path).load()
    assert {record.path for record in loaded.state.checkpoints} == {paths[1], paths[2], failed.path}
    assert paths[0] in loaded.warning
    assert paths[2] in loaded.warning


def test_when_none_is_there_all_stay_listed(tmp_path: Path):
    file_of(tmp_path).save(example(checkpoints=(report("a", 0), report("b", 1))))
    loaded = file_of(tmp_path).load()
    assert len(loaded.state.checkpoints) == 2
    assert "None of the 2 checkpoints that it lists is there" in loaded.warning


def test_what_was_being_written_and_is_there_is_complete(tmp_path: Path):
    path = persisted(tmp_path, 5)
    # A store finishes what it has begun, also when nobody waits for it any more.
    for status in (Status.PENDING, Status.FAILED, Status.TIMED_OUT):
        file_of(tmp_path).save(example(checkpoints=(Record(path=path, status=status),)))
        [record] = file_of(tmp_path).load().state.checkpoints
        assert record.status is Status.COMPLETE
    # But not what is going to be removed, or what somebody could not restore.
    for state in (example(removing=(path,)), example(checkpoints=(Record(path=path, status=Status.LOST),))):
        file_of(tmp_path).save(state)
        assert not any(one.status.is_restorable for one in file_of(tmp_path).load().state.checkpoints)


def test_what_is_no_unicode_keeps_no_state_from_being_written(tmp_path: Path):
    state = example(checkpoints=(Record(path="checkpoint_\udcff", reason="\udcfe: no space", metrics={"a": math.inf}),))
    file_of(tmp_path).save(state)
    assert parse_state((tmp_path / STATE).read_bytes(), "") == state


def test_directories_whose_names_cannot_be_read_are_passed_over(tmp_path: Path):
    path = persisted(tmp_path, 5)
    for parent in (tmp_path, (tmp_path / path).parent):
        os.mkdir(os.fsencode(parent) + b"/checkpoint_\xff")
    [record] = file_of(tmp_path).load().state.checkpoints
    assert record.path == path


def test_storage_that_fails_says_nothing_of_what_is_there():
    class Failing(Sink):
        def open_input_stream(self, path: str) -> Any:
            raise OSError("no connection")

    with pytest.raises(StorageError, match=r"state\.json.*no connection"):
        StateFile(Failing().filesystem(), "bucket/run").load()


# Versions.


def test_fields_of_other_builds_are_passed_over():
    tree = json.loads(example(checkpoints=(report("a", 0),)).to_bytes())
    tree["colour"] = tree["driver"]["colour"] = tree["checkpoints"][0]["colour"] = "red"
    assert parse_state(json.dumps(tree).encode(), "x") == example(checkpoints=(report("a", 0),))


def test_a_newer_version_is_refused_in_words_and_stays(tmp_path: Path):
    newer = json.dumps({"version": VERSION + 1}).encode()
    file_of(tmp_path).save(example())
    (tmp_path / STATE).write_bytes(newer)
    said = rf"has version {VERSION + 1}, and this ray_jax_ckpt knows versions up to {VERSION}.*name="
    with pytest.raises(NotSupportedError, match=said):
        file_of(tmp_path).load()
    with pytest.raises(NotSupportedError, match=said):
        file_of(tmp_path).save(example())
    assert (tmp_path / STATE).read_bytes() == newer


def test_what_rays_manager_wrote_is_version_0():
    state = parse_state((OLD_STATES / "version_0.json").read_bytes(), "x")
    found = {record.report_index: (record.status, record.metrics["score"]) for record in state.checkpoints}
    assert found == {
        0: (Status.COMPLETE, 3.0),
        1: (Status.VALIDATED, 5.0),
        2: (Status.COMPLETE, None),
        3: (Status.VALIDATING, 2.0),
    }
    assert state.report_index == 5
    assert {record.origin for record in state.checkpoints} == {"report"}
    assert state.checkpoints[0].path == "checkpoint_2026-11-29_10-00-02.000000"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is empty"),
        (b"[1]", "is no JSON object|it is no JSON object"),
        (b"{}", "version None"),
        (b'{"version": true}', "version True"),
        (b'{"version": 1, "checkpoints": 3}', "damaged"),
        (b'{"version": 1, "checkpoints": [3]}', "damaged"),
        (b'{"version": 1, "checkpoints": [{"path": "../other"}]}', r"checkpoints\.0\.path"),
        (b'{"version": 1, "checkpoints": [{"path": "a", "generation": "x"}]}', r"checkpoints\.0\.generation"),
        (b'{"version": 1, "checkpoints": [{"path": "a", "status": "fine"}]}', r"checkpoints\.0\.status"),
        (b'{"ray_version": "2", "checkpoint_results": [{}]}', "damaged: KeyError"),
        (b"[" * 100_000, "damaged"),
    ],
)
def test_what_is_no_state_is_refused(raw: bytes, said: str):
    with pytest.raises(StateError, match=said):
        parse_state(raw, "here")


def test_so_many_attempts_are_remembered():
    state = State(attempts=tuple(AttemptRecord(attempt=n) for n in range(40)))
    assert [one.attempt for one in state.attempts] == list(range(8, 40))


# Drivers.


def test_an_older_driver_writes_no_more(tmp_path: Path):
    older, newer = file_of(tmp_path), file_of(tmp_path)
    first = State(driver=driver("one", 100.0))
    older.save(first)
    # The newer one's clock is late.
    second = newer.load().state.taken_over(driver("two", 50.0))
    newer.save(second)
    with pytest.raises(StaleDriverError, match=r"belongs to the driver two \(process 7 on here\)"):
        older.save(first.changed(report_index=5))
    newer.save(second.changed(report_index=6))
    assert newer.load().state.report_index == 6
    with pytest.raises(StaleDriverError):
        file_of(tmp_path).save(State())


def test_taking_over_gives_up_what_was_being_written():
    writing, ready = Record(path="a", status=Status.PENDING), Record(path="b")
    state = State(driver=driver("one"), finished_at_s=5.0, checkpoints=(writing, ready))
    taken = state.taken_over(driver("two"))
    assert [record.status for record in taken.checkpoints] == [Status.FAILED, Status.COMPLETE]
    assert "has ended" in taken.checkpoints[0].reason
    assert taken.finished_at_s is None
    assert taken.driver is not None
    assert taken.driver.started_at_s > 100.0
    assert taken.taken_over(taken.driver) == taken


def test_a_coordinator_that_is_started_again_goes_on_with_its_drivers_state():
    writing = Record(path="a", status=Status.PENDING)
    state = State(driver=driver("one"), finished_at_s=5.0, first_attempt=3, checkpoints=(writing,))
    taken = state.taken_over(driver("one", 200.0))
    # What it was writing nobody finishes: whoever waits for that is not to wait for ever.
    assert [record.status for record in taken.checkpoints] == [Status.FAILED]
    assert (taken.driver, taken.finished_at_s, taken.first_attempt) == (state.driver, 5.0, 3)
    assert taken.taken_over(driver("two")).first_attempt == 0


# Crashes.


@pytest.mark.parametrize("renaming", [True, False])
def test_whenever_a_write_is_cut_off_the_old_or_the_new_one_is_there(
    tmp_path: Path, renaming: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray_jax_ckpt.storage.files.renames", lambda filesystem: renaming)
    states = [example().changed(report_index=n) for n in (1, 2, 3)]
    dry = Dying()
    _write_all(dry, tmp_path / "dry", states)
    for kill_after in range(dry.done):
        run, disk = tmp_path / f"{renaming}-{kill_after}", Dying(kill_after)
        with pytest.raises(Killed):
            _write_all(disk, run, states)
        found = StateFile(LOCAL, str(run)).load().state.report_index
        done = [n for n in (1, 2, 3) if f"{n}" in (run / "done").read_text()] if (run / "done").exists() else []
        newest = max(done, default=0)
        # Never older than the last one whose writing returned, and never anything else.
        assert found in (newest, newest + 1)
        file_of(run).save(states[-1])
        assert file_of(run).load().state == states[-1]


def _write_all(disk: Dying, run: Path, states: list[State]) -> None:
    file = StateFile(disk.filesystem(), str(run))
    for state in states:
        file.save(state)
        with (run / "done").open("a") as done:
            done.write(f"{state.report_index}\n")


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path):
    file_of(tmp_path).save(example())
    leftovers = [tmp_path / "ray_jax_ckpt" / f"state.json.{n}.aside" for n in range(2)]
    for each in leftovers:
        each.write_text("{")
    os.utime(leftovers[0], (1.0, 1.0))
    file_of(tmp_path).save(example())
    assert [each.exists() for each in leftovers] == [False, True]


def test_object_stores_take_it_in_one_upload():
    sink = Sink()
    file = StateFile(sink.filesystem(), "bucket/run")
    file.save(example())
    file.save(example().changed(report_index=7))
    assert sink.below("bucket/run") == {STATE, PREVIOUS}
    assert file.load().state.report_index == 7
    assert sink.opened == [f"bucket/run/{name}" for name in (STATE, PREVIOUS, STATE)]


# The saver.


def test_the_newest_wins_and_the_caller_does_not_wait():
    sink = Sink()
    opened, counted = [], []
    sink.on_open = lambda path: (opened.append(path), time.sleep(0.05))[0]
    saver = StateSaver(StateFile(sink.filesystem(), "bucket/run"))
    outcomes = [saver.put(example().changed(report_index=n)) for n in range(50)]
    assert saver.flush(10) == ""
    assert all(outcome.result(1) is None for outcome in outcomes)
    assert saver.file.load().state.report_index == 49
    counted = [path for path in opened if path.endswith("state.json")]
    assert len(counted) < 10
    saver.close()


def test_it_tries_again_until_storage_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray_jax_ckpt.storage.saver.FIRST_PAUSE_S", 0.01)
    sink, told = Sink(), []

    def refuse(path: str) -> None:
        if len(told) < 3:
            raise OSError("not today")

    sink.on_open = refuse
    saver = StateSaver(StateFile(sink.filesystem(), "bucket/run"), told.append)
    outcome = saver.put(example())
    outcome.result(10)
    assert len(told) == 3
    assert "not today" in told[0]
    assert saver.flush(1) == ""
    saver.close()
    with pytest.raises(StaleDriverError, match="closed"):
        saver.put(example()).result(1)


def test_flushing_says_what_is_not_there():
    sink = Sink()

    def refuse(path: str) -> None:
        raise OSError("not today")

    sink.on_open = refuse
    saver = StateSaver(StateFile(sink.filesystem(), "bucket/run"))
    outcome = saver.put(example())
    assert "not" in saver.flush(0.2)
    saver.close()
    with pytest.raises(StaleDriverError):
        outcome.result(1)


def test_what_is_amended_replaces_no_state_of_another_writer(tmp_path: Path):
    saver, one, two = StateSaver(StateFile(LOCAL, str(tmp_path))), object(), object()
    saver.put(State(report_index=1), one)
    saver.amend(State(report_index=2), one)
    saver.flush(10)
    assert saver.file.load().state.report_index == 2
    saver.put(State(report_index=3), two)
    saver.amend(State(report_index=2), one)
    saver.flush(10)
    assert saver.file.load().state.report_index == 3


def test_a_saver_whose_run_was_taken_over_ends(tmp_path: Path, caplog: Any):
    saver = StateSaver(file_of(tmp_path))
    saver.put(State(driver=driver("one"))).result(10)
    file_of(tmp_path).save(file_of(tmp_path).load().state.taken_over(driver("two")))
    with caplog.at_level(logging.WARNING), pytest.raises(StaleDriverError):
        saver.put(State(driver=driver("one"))).result(10)
    assert "is not written any more" in caplog.text
    assert "two" in saver.flush(1)
    assert file_of(tmp_path).load().state.driver.id == "two"  # pyright: ignore[reportOptionalMemberAccess]
