"""What a run goes on from: of memory, the stores' checkpoints, reported ones, and what its driver asks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pyarrow.fs
import pytest
import ray
import ray.train
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt import handover, session
from ray_jax_ckpt.errors import NoCheckpointError, RestoreError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.model.choice import Resume, Tier
from ray_jax_ckpt.storage.state import STATE


def state_of(step: int) -> dict:
    return {"w": jnp.arange(100.0) + step, "step": step}


def persisted(run, *steps: int) -> None:
    for step in steps:
        run.take_at(step, state_of(step))
        eventually(lambda step=step: step in run.steps(), 60)


def decided(run):
    return run.sessions[0].decision


def restore_all(run) -> set[int]:
    found = decided(run)
    where = run.checkpoint() or ray.train.Checkpoint(found.stored.path, filesystem=found.stored.filesystem)
    return {restored.step for restored in run.all_ranks(lambda rank: rjc.restore(where, state_of(0)))}


def end_driver(run, *, stores: bool) -> None:
    """With or without what memory holds."""
    ray.kill(run.coordinator)
    run.coordinator = None
    if stores:
        for handle in run.stores().values():
            ray.kill(handle)
        eventually(lambda: not fleet.living_stores(run.run))


def crash(run) -> None:
    """All ranks restore, and the group fails."""
    restore_all(run)
    ray.get(run.coordinator.failed.remote(["ValueError: nan"]), timeout=30)
    run.begin(copies=2)


def test_a_reported_checkpoint_that_is_newer_than_all_others_counts_for_every_rank(run_of):
    run = run_of(every_n_steps=10)
    persisted(run, 10)
    handle = run.take_at(12, state_of(12), force=True)
    reported = Path(handle.to_directory(Path(run.path, "checkpoint_2026-01-01")))
    # Of the same age as what the stores wrote, of somebody else, and still being copied.
    shutil.copytree(run.path_of(10), Path(run.path, "checkpoint_2025-12-31"))
    Path(run.path, "checkpoint_2026-01-02").mkdir()
    end_driver(run, stores=True)
    run.begin(copies=2)
    place = decided(run).stored
    assert (place.generation.step, place.tier, place.path) == (12, Tier.RAY, str(reported))
    assert restore_all(run) == {12}
    (event,) = eventually(lambda: run.events("decision")[1:])
    assert (event["step"], event["tier"], event["path"]) == (12, "ray", str(reported))
    assert 0 < event["age_s"] < 600
    # Not whole (yet): the stores' own is the newest.
    next(reported.glob("w/c/*")).unlink()
    run.begin(copies=2)
    place = decided(run).stored
    assert (place.generation.step, place.tier) == (10, Tier.STORAGE)


def test_what_two_attempts_have_crashed_with_is_passed_over_for_the_next_older_one(run_of):
    run = run_of(every_n_steps=10, on_failure=False)
    persisted(run, 10)
    run.take_at(12, state_of(12))
    rjc.wait(30)
    run.begin(copies=2)
    crash(run)
    assert decided(run).located.generation.step == 12
    # An attempt whose ranks did not get as far as to restore says nothing of it.
    ray.get(run.coordinator.failed.remote(["ValueError: nan"]), timeout=30)
    run.begin(copies=2)
    assert decided(run).located.generation.step == 12
    crash(run)
    found = decided(run)
    assert (found.located, found.stored.generation.step) == (None, 10)
    # It crashes with that, too, and there is nothing else: better the newest than nothing.
    crash(run)
    crash(run)
    assert decided(run).located.generation.step == 12
    # Who gets on has left it behind.
    restore_all(run)
    run.take_at(13, state_of(13))
    rjc.wait(30)
    run.begin(copies=2)
    assert decided(run).located.generation.step == 13
    eventually(lambda: len(run.events("decision")) == run.sessions[0].decision.attempt)
    assert [event["steps_lost"] for event in run.events("decision")][:2] == [None, 0]


def test_a_run_that_starts_anew_restores_nothing_old_keeps_it_and_outranks_it(run_of):
    run = run_of(every_n_steps=10, num_to_keep=1)
    persisted(run, 30)
    run.take_at(31, state_of(31))
    rjc.wait(30)
    end_driver(run, stores=False)
    run.resume = Resume("never")
    run.begin(copies=2)
    found = decided(run)
    assert (found.located, found.stored, found.ray_counts, found.needed) == (None, None, False, "")
    # Nor does the next attempt, before there is anything new, nor one after its coordinator has been killed.
    run.begin(copies=2)
    assert (decided(run).located, decided(run).stored) == (None, None)
    ray.kill(run.coordinator, no_restart=False)
    run.begin(copies=2)
    assert (decided(run).located, decided(run).stored) == (None, None)
    persisted(run, 10)
    run.begin(copies=2)
    assert decided(run).located.generation.step == 10
    persisted(run, 20)
    run.await_steps(20, 30)
    end_driver(run, stores=True)
    run.resume = Resume()
    run.begin(copies=2)
    assert decided(run).stored.generation.step == 20


def test_a_run_that_starts_anew_waits_until_it_is_known_what_is_old(run_of, disk):
    run = run_of(every_n_steps=10, filesystem=disk.filesystem)
    persisted(run, 30)
    end_driver(run, stores=True)
    run.resume = Resume("never")
    disk.says("silent")
    with pytest.raises(RestoreError, match="cannot be read"):
        run.begin(copies=2)
    disk.says("")
    run.begin(copies=2)
    assert (decided(run).located, decided(run).stored) == (None, None)
    # Its own counts, also when nothing but storage is left to tell that it is its own.
    persisted(run, 10)
    # The file itself: it may be written late, after the storage was silent.
    eventually(lambda: json.loads(Path(run.path, STATE).read_text())["first_attempt"], 90)
    ray.kill(run.coordinator, no_restart=False)
    for handle in run.stores().values():
        ray.kill(handle)
    eventually(lambda: not fleet.living_stores(run.run))
    run.begin(copies=2)
    assert decided(run).stored.generation.step == 10


def test_a_run_that_has_to_go_on_says_what_it_looked_for(run_of, monkeypatch, tmp_path):
    run = run_of(every_n_steps=10)
    end_driver(run, stores=False)
    run.resume = Resume("must")
    run.begin(copies=2)
    looked = rf"resume='must', and there is nothing.*memory \(.*{run.path}/ray_jax_ckpt/checkpoints.*through Ray"
    for reported, expected in ((None, looked), ("what Ray has", None)):
        given = hand_over(run, monkeypatch, reported)
        if expected is None:
            assert given == reported
            continue
        with pytest.raises(NoCheckpointError, match=expected):
            rjc.restore(given)
        with pytest.raises(NoCheckpointError, match=expected):
            session.current()


def hand_over(run, monkeypatch, reported):
    """What `get_checkpoint()` gives after the start hook, where Ray alone would give `reported`."""
    given: list = []
    monkeypatch.setattr(session, "_current", session.Wiring(run.coordinator, run.sessions[0].config))
    monkeypatch.setattr(handover, "_reported", [reported])
    monkeypatch.setattr(handover._ray_compat, "world_rank", lambda: 0)
    monkeypatch.setattr(handover._ray_compat, "set_checkpoint", given.append)
    handover.decide(decided(run))
    return given[0]


def test_a_run_begins_with_what_its_driver_names_and_goes_on_with_its_own(run_of, monkeypatch, tmp_path):
    other = run_of(every_n_steps=10, path=str(tmp_path / "other"))
    persisted(other, 10)
    source = other.path_of(10)
    # A run that has ended well goes on, and says so.
    ray.get(other.coordinator.finish.remote(keep=False), timeout=60)
    end_driver(other, stores=True)
    other.begin(copies=2)
    assert decided(other).stored.path == source
    eventually(lambda: [event["step"] for event in other.events("resumed_after_end")] == [10])
    run = run_of(every_n_steps=100)
    end_driver(run, stores=False)
    run.resume = Resume("auto", source)
    run.begin(copies=2)
    place = decided(run).stored
    assert (place.path, place.tier, place.generation.step) == (source, Tier.GIVEN, 10)
    assert restore_all(run) == {10}
    run.take_at(11, state_of(11))
    rjc.wait(30)
    run.begin(copies=2)
    assert decided(run).located.generation.step == 11
    # What Ray has of this run counts more than what was named; and then nothing does but that.
    end_driver(run, stores=True)
    run.begin(copies=2)
    assert hand_over(run, monkeypatch, "what Ray has") == "what Ray has"
    assert hand_over(run, monkeypatch, None).path == source
    # It is not there.
    end_driver(run, stores=False)
    run.resume = Resume("auto", f"file://{tmp_path}/nowhere")
    run.begin(copies=2)
    with pytest.raises(NoCheckpointError, match=r"resume_from='file://.*nowhere': there is no directory .*nowhere"):
        rjc.restore(hand_over(run, monkeypatch, None))


def test_a_directory_of_plain_orbax_can_be_named(run_of, monkeypatch, tmp_path):
    (tmp_path / "orbax").mkdir()
    run = run_of(every_n_steps=10)
    end_driver(run, stores=False)
    run.resume = Resume("never", (str(tmp_path / "orbax"), pyarrow.fs.LocalFileSystem()))
    run.begin(copies=2)
    assert hand_over(run, monkeypatch, "what Ray has").path == str(tmp_path / "orbax")
