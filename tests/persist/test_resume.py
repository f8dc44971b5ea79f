"""What a new worker group restores: the newest of memory and storage, verified, or the next older one."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import ray
import ray.train
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt import handover, session
from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.testing import assert_identical


def state_of(step: int) -> dict:
    return {"w": jnp.arange(1000.0) + step, "step": step}


def lose_memory(run) -> None:
    """Every store of the run dies, and its coordinator with the driver."""
    run.close()
    eventually(lambda: not fleet.living_stores(run.run), 30)
    run.coordinator = None


def restore_all(run, place):
    checkpoint = ray.train.Checkpoint(place.path, filesystem=place.filesystem)
    return run.all_ranks(lambda rank: rjc.restore(checkpoint, state_of(0)))


def persisted(run, *steps: int) -> None:
    for step in steps:
        run.take_at(step, state_of(step), data={"position": step})
        eventually(lambda step=step: step in run.steps(), 60)


def decided(run):
    return run.sessions[0].decision


def test_memory_counts_while_it_has_the_newest(run_of):
    run = run_of(every_n_steps=10)
    assert (decided(run).located, decided(run).stored) == (None, None)
    persisted(run, 10)
    run.take_at(11, state_of(11))
    run.drain()
    rjc.wait(30)
    run.begin(copies=2)
    assert decided(run).located.generation.step == 11
    assert decided(run).stored is None


def test_storage_counts_when_memory_is_gone(run_of):
    run = run_of(every_n_steps=10)
    persisted(run, 10, 20)
    lose_memory(run)
    run.begin(copies=2)
    place = decided(run).stored
    assert (decided(run).located, place.generation.step) == (None, 20)
    for restored in restore_all(run, place):
        assert (restored.step, restored.source, restored.data) == (20, "storage", {"position": 20})
        assert_identical(restored.state, state_of(20))
    # Attempts go on from those on storage, or the next checkpoint would count as older than these.
    assert decided(run).attempt > place.generation.attempt
    persisted(run, 30)
    assert run.steps() == [10, 20, 30]


def test_one_that_lacks_a_file_is_passed_over_and_a_damaged_one_fails_an_attempt(run_of):
    run = run_of(every_n_steps=10)
    persisted(run, 10, 20, 30)
    next(Path(run.path_of(30)).glob("w/c/*")).unlink()
    chunk = next(Path(run.path_of(20)).glob("w/c/*"))
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    lose_memory(run)
    run.begin(copies=2)
    assert decided(run).stored.generation.step == 20
    found = restore_all(run, decided(run).stored)
    assert all(isinstance(one, IntegrityError) for one in found), found
    eventually(lambda: run.events("suspected"), 30)
    run.begin(copies=2)
    place = decided(run).stored
    assert place.generation.step == 10
    for restored in restore_all(run, place):
        assert_identical(restored.state, state_of(10))


def test_the_start_hook_hands_it_over(run_of, monkeypatch):
    run, given = run_of(every_n_steps=10), []
    persisted(run, 10)
    monkeypatch.setattr(handover._ray_compat, "world_rank", lambda: 0)
    monkeypatch.setattr(handover._ray_compat, "set_checkpoint", given.append)
    for name in ("located", "stored"):
        if name == "stored":
            lose_memory(run)
        run.begin(copies=2)
        monkeypatch.setattr(handover, "_reported", [None])
        monkeypatch.setattr(session, "_current", session.Wiring(run.coordinator, run.sessions[0].config))
        handover.decide(decided(run))
        assert isinstance(given[-1], ray.train.Checkpoint)
        assert (given[-1].path == run.path_of(10)) == (name == "stored")
