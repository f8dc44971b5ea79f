"""Ranks that do not do the same are found, named, and never waited for without an end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray
from group import Group
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt import worker
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
from ray_jax_ckpt.errors import (
    RestoreError,
    RestoreTimeoutError,
    SnapshotError,
    SnapshotTimeoutError,
    TreeMismatchError,
)


@pytest.fixture(scope="module")
def pair(nodes):
    """Two ranks on two nodes, for all tests of this module."""
    group = Group(nodes[:2])
    yield group
    group.close()


@pytest.fixture
def ranks(pair, monkeypatch):
    monkeypatch.setattr(worker, "current", pair.current)
    pair.begin(copies=2)
    for one in pair.sessions:
        one.restores += 1
    return pair


def state_of(rank, step):
    return {"w": np.full(1000, 10 * step + rank), "step": step}


def test_ranks_that_count_their_steps_differently_are_named_and_training_goes_on(ranks):
    steps = {0: (10, 20), 1: (11, 21)}
    for number in (0, 1):
        ranks.all_ranks(lambda rank, n=number: rjc.snapshot(steps[rank][n], state_of(rank, steps[rank][n])))
        for one in ranks.sessions:
            one.drain(20)
    # Whichever comes last, nobody waits for its buffer.
    with pytest.raises(
        SnapshotError, match=r"step 20 was abandoned: rank 1 went from step 11 on to step 21 without it.*same steps"
    ):
        rjc.wait()
    # Once they count alike again, all is well.
    handles = ranks.all_ranks(lambda rank: rjc.snapshot(30, state_of(rank, 30)))
    rjc.wait()
    assert rjc.latest() == 30
    found = ranks.all_ranks(lambda rank: rjc.restore(handles[rank]))
    assert [each.step for each in found] == [30, 30]
    assert [each.state["w"][0] for each in found] == [300, 301]


def test_a_rank_that_leaves_a_step_out_is_named(ranks):
    ranks.all_ranks(lambda rank: rank == 1 or rjc.snapshot(5, state_of(rank, 5)))
    ranks.sessions[0].drain(20)
    with ranks.as_rank(1):
        rjc.snapshot(6, state_of(1, 6))
    with pytest.raises(SnapshotError, match=r"step 5 was abandoned: rank 1 went on to step 6 without it, ranks \[0\]"):
        rjc.wait()


def test_only_one_rank_snapshots_and_the_other_is_named_with_what_it_did(ranks):
    ranks.all_ranks(lambda rank: rjc.snapshot(4, state_of(rank, 4)))
    rjc.wait()
    rjc.snapshot(5, state_of(0, 5))
    with pytest.raises(
        SnapshotTimeoutError, match=r"Step 5 was not protected within 1 s.*rank 1 snapshotted step 4 .* s ago"
    ):
        rjc.wait(timeout_s=1)
    assert rjc.latest() == 4


def test_ranks_with_different_trees_are_named_with_what_differs(ranks):
    states = {0: {"w": 1, "same": 2}, 1: {"w": np.ones(3), "same": 2, "extra": "x"}}
    ranks.all_ranks(lambda rank: rjc.snapshot(7, states[rank]))
    with pytest.raises(
        SnapshotError, match=r"step 7 was abandoned: ranks snapshotted different trees.*ranks \[0\] and ranks \[1\]"
    ) as caught:
        rjc.wait()
    for part in (
        "only ranks [0] have ['w'] (value)",
        "only ranks [1] have ['w'] (numpy)",
        "only ranks [1] have ['extra']",
    ):
        assert part in str(caught.value)
    assert "['same']" not in str(caught.value)


def test_a_rank_that_does_not_restore_is_named_with_what_it_is_doing(ranks):
    handles = ranks.all_ranks(lambda rank: rjc.snapshot(8, state_of(rank, 8)))
    rjc.wait()
    text = r"Restoring step 8: rank 0 waited 1 s for ranks \[1\], which have not restored: rank 1 snapshotted step 8"
    with pytest.raises(RestoreTimeoutError, match=text):
        rjc.restore(handles[0], timeout_s=1)
    # It is in the middle of its restore, and reads for ever.
    ranks.sessions[1].record("restore_begin", step=8)
    with pytest.raises(RestoreTimeoutError, match=r"rank 1 began to restore step 8 .* s ago"):
        rjc.restore(handles[0], timeout_s=1)
    # It has failed.
    with ranks.as_rank(1), pytest.raises(TreeMismatchError):
        rjc.restore(handles[1], {"other": 1})
    with pytest.raises(RestoreTimeoutError, match=r"rank 1 failed to restore \(TreeMismatchError.*\['other'\]"):
        rjc.restore(handles[0], timeout_s=1)


def test_ranks_agree_on_the_step_that_they_restore_or_all_fail(ranks):
    for step in (1, 2):
        handles = ranks.all_ranks(lambda rank, s=step: rjc.snapshot(s, state_of(rank, s), force=True))
        rjc.wait()
        ranks.kept = [*getattr(ranks, "kept", []), handles]
    found = ranks.all_ranks(lambda rank: rjc.restore(ranks.kept[rank][rank]))
    assert all(isinstance(each, RestoreError) for each in found), found
    assert "Ranks restored different snapshots" in str(found[0])
    assert ".1'" in str(found[0])
    assert ".2'" in str(found[0])
    del ranks.kept


def test_the_restored_step_is_the_same_everywhere_and_lower_than_one_may_have_logged(ranks):
    ranks.all_ranks(lambda rank: rjc.snapshot(1683, state_of(rank, 1683)))
    rjc.wait()
    ranks.begin(copies=2)
    found = ranks.all_ranks(lambda rank: rjc.restore(ranks.checkpoint()))
    assert {each.step for each in found} == {1683}
    # One goes on from the step, the other from its log's.
    ranks.all_ranks(lambda rank: rjc.snapshot((1684, 1752)[rank], state_of(rank, 1)))
    with pytest.raises(SnapshotError, match=r"step 1684 was abandoned: rank 1 went on to step 1752 without it"):
        rjc.wait()


def test_a_killed_store_says_that_it_holds_nothing_and_is_filled_again_from_its_peer(ranks):
    ranks.all_ranks(lambda rank: rjc.snapshot(20, state_of(rank, 20)))
    rjc.wait()
    store = ranks.sessions[1].decision.stores[1]
    pid = ray.get(store.pid.remote())
    ray.kill(store)
    eventually(lambda: not psutil.pid_exists(pid))
    # The next group gets a new, empty one under the same name, and all of the step from the other.
    ranks.begin(copies=2)
    found = ranks.all_ranks(lambda rank: rjc.restore(ranks.checkpoint()))
    assert [each.step for each in found] == [20, 20]
    assert [each.state["w"][0] for each in found] == [200, 201]
    assert found[1].source == "memory:peer"
    held = eventually(lambda: ray.get(ranks.sessions[1].decision.stores[1].inventory.remote()).held)
    assert {report.generation.step for report in held} == {20}


def test_what_nobody_holds_is_an_error_that_says_what_is_held(ranks):
    ranks.all_ranks(lambda rank: rjc.snapshot(3, state_of(rank, 3)))
    rjc.wait()
    gone = SnapshotCheckpoint(type(ranks.sessions[0].latest_generation)(0, 0, 20))
    with pytest.raises(RestoreError, match=r"Step 20 .*is not held completely; complete steps: \[.*3"):
        rjc.restore(gone)


def test_arrays_of_every_rank_come_back_to_the_rank_whose_they_are(ranks):
    states = {rank: {"w": jnp.full(100, rank), "n": rank, "name": f"rank {rank}"} for rank in (0, 1)}
    ranks.all_ranks(lambda rank: rjc.snapshot(2, states[rank]))
    rjc.wait()
    ranks.begin(copies=2)
    found = ranks.all_ranks(lambda rank: rjc.restore(ranks.checkpoint(), states[rank]).state)
    assert [each["name"] for each in found] == ["rank 0", "rank 1"]
    assert [float(each["w"][0]) for each in found] == [0, 1]
