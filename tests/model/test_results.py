"""Which checkpoints are better, and which go."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jax_ckpt.model.results import Entry, Policy, Status, newest, ranked, superfluous

VERIFIED = (Status.COMPLETE, Status.VALIDATED)


def entry(age: int, score: Any = None, status: Status = Status.COMPLETE, step: int | None = None) -> Entry:
    return Entry(str(age), age, age if step is None else step, status, {} if score is None else {"a": {"b": score}})


def ages(entries: list[Entry]) -> list[int]:
    return [one.age for one in entries]


@pytest.mark.parametrize(("order", "expected"), [("max", [9, 3, 1, 2, 4, 0]), ("min", [9, 3, 0, 4, 1, 2])])
def test_by_score_then_by_age(order: Any, expected: list[int]):
    entries = [entry(0, 8), entry(1, 2), entry(2, 2), entry(3, None), entry(4, 5), entry(9, 3, Status.VALIDATING)]
    found = ages(ranked(Policy(2, "a.b", order), entries))
    assert found == ([3, 9, *expected[2:]])


def test_without_a_score_by_age():
    assert ages(ranked(Policy(), [entry(2, 9), entry(0, 5, Status.PENDING), entry(1, 7)])) == [0, 1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "9", [1], {"x": 1}])
@pytest.mark.parametrize("order", ["max", "min"])
def test_what_is_no_finite_number_displaces_none(bad: Any, order: Any):
    policy = Policy(1, "a.b", order)
    entries = [entry(0, 1.0), entry(1, bad), entry(2, 5.0 if order == "min" else -5.0)]
    assert ages(superfluous(policy, entries)) == [1]


statuses = st.sampled_from(list(Status))
entries_ = st.lists(st.tuples(st.none() | st.floats() | st.integers(0, 3), statuses), max_size=8).map(
    lambda found: [entry(age, score, status) for age, (score, status) in enumerate(found)]
)
policies = st.builds(
    Policy,
    st.none() | st.integers(1, 3),
    st.none() | st.just("a.b"),
    st.sampled_from(["max", "min"]),
    st.none() | st.just(3),
)


@settings(deadline=None)
@given(policies, entries_, st.sets(st.integers(0, 7)))
def test_what_goes(policy: Policy, entries: list[Entry], protected: set[int]):
    doomed = superfluous(policy, entries, {str(age) for age in protected})
    gone = {one.key for one in doomed}
    left = [one for one in entries if one.key not in gone]
    verified = [one for one in entries if one.status in VERIFIED]
    assert not any(one.status.is_pending or one.age in protected for one in doomed)
    # What could be restored still can, and the newest of it is the newest.
    if verified:
        assert max(verified, key=lambda one: one.age) in left
    if any(one.status.is_restorable for one in entries):
        assert newest(left) == newest(entries)
    # Nobody that goes is better than one that stays and counts.
    if policy.num_to_keep is not None and not protected:
        counted = [one for one in verified if policy.keep_every_n_steps is None or one.step % 3]  # pyright: ignore
        best = ranked(policy, counted)[-policy.num_to_keep :]
        assert all(one in left for one in best)
        assert sum(one in left for one in counted) <= policy.num_to_keep + 1
    # It is done once: nothing else goes when they are gone.
    assert not superfluous(policy, left, {str(age) for age in protected})


def test_the_rejected_goes_when_there_is_a_newer_one():
    policy = Policy(2)
    rejected = entry(1, status=Status.INVALID)
    assert superfluous(policy, [entry(0), rejected]) == []
    assert superfluous(policy, [entry(0), rejected, entry(2)]) == [rejected]
    assert superfluous(Policy(), [entry(0), rejected, entry(2)]) == []
