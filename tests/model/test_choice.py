"""Which generation is restored after attempts that failed, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.choice import (
    MAX_CRASHES,
    MAX_TRIALS,
    Announcement,
    Crashes,
    Resume,
    Tier,
    Trial,
    crash_kind,
    crashing,
    passed_over,
    rank,
    remembered,
    steps_lost,
)
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Generation

NAN = frozenset(["ValueError: the loss is nan", "its process died"])
crashes = st.frozensets(st.sampled_from(["a", "b", "c"]), max_size=2)
generations = st.builds(Generation, st.integers(1, 4), st.integers(0, 1), st.integers(0, 5))
trials = st.lists(
    st.builds(Trial, st.integers(1, 9), st.none() | generations, st.none() | generations, crashes), max_size=12
)
G = Generation(2, 0, 40)


def test_two_attempts_that_fail_after_restoring_it_are_enough():
    first, second = (Trial(n, restored=G, newest=G, crash=NAN) for n in (3, 4))
    assert crashing([first]) == {}
    assert crashing([first, second]) == {G: Crashes("ValueError: the loss is nan", (3, 4))}


def test_an_error_is_the_same_whatever_numbers_are_in_it():
    first, second = "XlaRuntimeError: peer [10.0.0.1]:7 at 0x1a\nafter 3 s", "XlaRuntimeError: peer [10.0.0.4]:5 at 0xf"
    assert crash_kind(first) == crash_kind(second) == "XlaRuntimeError: peer [#.#.#.#]:# at #"
    assert crash_kind(first) != crash_kind("XlaRuntimeError: out of memory")


@pytest.mark.parametrize(
    "second",
    [
        Trial(4, restored=G, newest=G),
        Trial(4, restored=None, newest=G, crash=NAN),
        Trial(4, restored=G, newest=Generation(4, 1, 41), crash=NAN),
        Trial(4, restored=Generation(1, 0, 30), newest=G, crash=NAN),
        Trial(4, restored=G, newest=G, crash=frozenset(["TypeError: something else"])),
    ],
    ids=["preempted or resized", "not restored by all", "got on", "another one", "another crash"],
)
def test_what_says_nothing_of_a_generation_does_not_count(second):
    assert crashing([Trial(3, restored=G, newest=G, crash=NAN), second]) == {}


@given(trials)
def test_nothing_is_avoided_without_two_failures_or_when_an_attempt_got_on(found):
    for generation, crashes in crashing(found).items():
        concerned = [trial for trial in found if trial.restored == generation]
        assert len(crashes.attempts) >= MAX_CRASHES
        assert sum(crashes.kind in trial.crash for trial in concerned) >= MAX_CRASHES
        assert all(trial.newest is None or trial.newest <= generation for trial in concerned)


@given(st.sets(generations, min_size=1), st.sets(generations))
def test_the_newest_that_is_not_avoided_comes_first_and_an_avoided_one_before_nothing(found, avoided):
    best = max(found, key=lambda generation: rank(generation, avoided))
    assert best == max(found - avoided or found)


@given(trials)
def test_a_trial_replaces_what_was_known_of_it_and_old_ones_are_forgotten(found):
    kept: tuple[Trial, ...] = ()
    for trial in found * 8:
        kept = remembered(kept, trial)
        assert kept[-1] == trial
    assert len(kept) <= MAX_TRIALS
    assert len({trial.attempt for trial in kept}) == len(kept)


def holding(*found: Generation) -> Books:
    books = books_.store_joined(Books(copies=1), "s", "node", incarnation="i")
    books = books_.attempts_known(books, 9)
    for number, generation in enumerate(found, 1):
        parts = frozenset([host_part_id(0)])
        report = Held("s", generation, 1, parts, parts, "tree", incarnation="i", number=number)
        books = books_.held(books, report)
    return books


def test_memory_lets_go_of_what_is_avoided_only_for_another_complete_one():
    older = Generation(1, 0, 30)
    assert passed_over(holding(G), 0, {G}).status(G) is Status.PROTECTED
    books = passed_over(holding(older, G), 0, {G})
    assert books.newest() == older
    assert "failed before anything newer was complete" in books.abandoned[G]


def test_a_run_that_starts_anew_gives_up_what_memory_has_of_the_old_one():
    books = passed_over(holding(G, Generation(5, 0, 1)), 5, ())
    assert books.complete() == [Generation(5, 0, 1)]
    assert "started anew" in books.abandoned[G]


def test_a_decision_is_one_line():
    said = str(Announcement("gpt", 3, G, Tier.MEMORY, age_s=12.4, lost_steps=3))
    assert said == (
        "Run gpt, attempt 3: restores step 40 from memory (generation 2.0.40, taken 12 s ago, at least 3 steps lost)."
    )
    said = str(Announcement("gpt", 3, G, Tier.RAY, "/runs/gpt/checkpoint_7"))
    assert "step 40 from storage, /runs/gpt/checkpoint_7 (generation 2.0.40, taken by an earlier driver)" in said
    assert "nothing to restore was found" in str(Announcement("gpt", 1, None))
    never = str(Announcement("gpt", 1, None, mode="never"))
    assert "starts from the beginning, since resume='never'" in never
    assert "left aside" in never
    assert "was found" not in never
    needed = str(Announcement("gpt", 1, None, mode="must", needed="resume='must', and there is nothing"))
    assert needed == "Run gpt, attempt 1: resume='must', and there is nothing"
    assert "restores /a, as resume_from says" in str(Announcement("gpt", 1, Generation(0, 0, 7), Tier.GIVEN, "/a"))


def test_lost_steps_are_those_of_the_line_that_was_left():
    assert steps_lost(G, [G, Generation(2, 0, 43)]) == 3
    assert steps_lost(G, []) is None
    assert steps_lost(G, [Generation(1, 0, 99)]) is None
    assert steps_lost(G, [Generation(3, 1, 2)]) == 0


def test_there_are_three_ways_to_resume():
    with pytest.raises(ConfigError, match="resume='always': say one of 'auto', 'never', 'must'"):
        Resume("always")  # pyright: ignore[reportArgumentType]
