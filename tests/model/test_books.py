"""The group's books: complete, protected, abandoned, what may be freed, and what a new attempt restores."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.recovery import choose_push
from ray_jax_ckpt.model.shards import Generation

G1, G2, G3 = (Generation(1, 0, step) for step in (10, 20, 30))
OWN = {"a": frozenset({"h0", "s0>1"}), "b": frozenset({"h1", "s1>0"})}


def group(copies: int = 2) -> Books:
    books = Books(copies=copies)
    for name in "ab":
        books = books_.store_joined(books, name, f"node-{name}")
    return books_.group_formed(books_.attempt_started(books, 1)[0], 1, "ab")


def hold(books: Books, store: str, generation: Generation, *parts: str, structure: str = "x") -> Books:
    names = frozenset(parts) or OWN[store]
    return books_.held(books, Held(store, generation, 2, names, names, structure))


def both(books: Books, generation: Generation) -> Books:
    """Own parts on both stores: complete, nothing replicated."""
    return hold(hold(books, "a", generation), "b", generation)


def pushed(books: Books, generation: Generation) -> Books:
    """And each other's: protected."""
    everything = OWN["a"] | OWN["b"]
    return hold(hold(both(books, generation), "a", generation, *everything), "b", generation, *everything)


def test_a_generation_is_pending_until_every_rank_has_stored_its_part():
    books = hold(group(), "a", G1)
    assert books.status(G1) is Status.PENDING
    assert books.missing(G1) == ["h1"]
    assert books.complete() == []


def test_complete_with_one_copy_protected_with_one_in_each_domain():
    assert both(group(), G1).status(G1) is Status.COMPLETE
    assert pushed(group(), G1).status(G1) is Status.PROTECTED
    assert both(group(copies=1), G1).status(G1) is Status.PROTECTED


def test_fewer_living_domains_than_copies_still_count_as_protected():
    books = pushed(group(), G1)
    assert books_.store_lost(books, "b").status(G1) is Status.PROTECTED


def test_a_protected_generation_survives_a_store_and_an_unreplicated_one_does_not():
    assert books_.store_lost(pushed(group(), G1), "b").complete() == [G1]
    assert books_.store_lost(both(group(), G1), "b").complete() == []


def test_a_newer_complete_generation_does_not_free_one_that_survives_more():
    books = both(pushed(group(), G1), G2)
    assert books.releasable() == frozenset()
    assert pushed(books, G2).releasable() == {G1}


def test_after_a_crash_with_the_newest_half_pushed_buffers_come_free_again():
    books = hold(both(pushed(group(), G1), G2), "b", G2, "h0", "s0>1")
    books, choice = books_.attempt_started(books, 2)
    assert choice == G2
    again = Generation(2, 0, 25)
    books = pushed(both(books, again), again)
    assert books.releasable() == {G1, G2}


def test_the_last_complete_generation_is_never_freed_for_an_incomplete_newer_one():
    books = hold(hold(both(group(), G1), "a", G2), "a", G3)
    assert books.releasable() == frozenset()


def test_an_abandoned_generation_is_free_and_never_restored():
    books = books_.abandoned(both(both(group(), G1), G2), G2, "skipped")
    assert books.releasable() == {G2}
    assert books.complete() == [G1]


def test_an_abandoned_generation_is_known_until_a_newer_one_is_complete():
    books = books_.abandoned(hold(group(), "a", G1), G1, "rank 1 skipped it")
    books = books_.released(books, books.releasable())
    assert books.abandoned == {G1: "rank 1 skipped it"}
    late = hold(books, "b", G1)
    assert late.releasable() == {G1}
    books = both(books_.released(late, [G1]), G2)
    assert books_.released(books, books.releasable()).abandoned == {}


def test_a_new_attempt_abandons_what_is_newer_than_its_choice_and_incomplete():
    books, choice = books_.attempt_started(hold(both(group(), G1), "a", G2), 2)
    assert choice == G1
    assert books.status(G2) is Status.ABANDONED
    assert books.status(G1) is Status.COMPLETE


def test_with_nothing_complete_an_attempt_starts_afresh_and_frees_the_buffers():
    books, choice = books_.attempt_started(hold(group(), "a", G1), 2)
    assert choice is None
    assert books.releasable() == {G1}


def test_a_damaged_copy_counts_as_none_and_an_older_generation_is_chosen():
    books = books_.dropped(both(pushed(group(), G1), G2), "b", G2, ["s1>0"])
    assert books_.attempt_started(books, 2)[1] == G1


def test_ranks_with_different_trees_make_the_generation_unusable():
    books = hold(hold(group(), "a", G1, structure="x"), "b", G1, structure="y")
    assert books.status(G1) is Status.ABANDONED
    assert "different trees" in books.abandoned[G1]


def test_a_rollback_starts_a_new_line_that_is_newer_at_lower_steps():
    books = both(both(group(), G3), Generation(1, 1, 15))
    assert books.complete()[0] == Generation(1, 1, 15)


def test_reports_of_stores_that_are_not_members_and_of_later_attempts_change_nothing():
    books = group()
    assert hold(books, "a", Generation(2, 0, 1)) == books
    assert books_.held(books, Held("z", G1, 2, OWN["a"], OWN["a"], "x")) == books


def test_a_store_that_joins_again_holds_only_what_it_says():
    books = books_.store_joined(both(group(), G1), "b", "node-b")
    assert books.missing(G1) == ["h1", "s1>0"]


def test_stores_outside_the_group_end_when_they_hold_nothing_any_more():
    books = books_.group_formed(both(group(), G1), 1, ["a"])
    assert books.idle() == []
    assert books_.released(books, [G1]).idle() == ["b"]


def test_what_lacks_copies_is_named_with_its_holders():
    assert both(group(), G1).undercovered(G1) == {
        "h0": {"a"}, "s0>1": {"a"}, "h1": {"b"}, "s1>0": {"b"},
    }  # fmt: skip
    assert pushed(group(), G1).undercovered(G1) == {}


def test_a_store_that_serves_no_worker_any_more_does_not_keep_its_generation_for_ever():
    books = books_.store_joined(pushed(group(), G1), "c", "node-c")
    books = books_.group_formed(books_.attempt_started(books, 2)[0], 2, "ac")
    again = Generation(2, 1, 20)
    everything = OWN["a"] | OWN["b"]
    for store in "ac":
        books = hold(books, store, again, *everything)
    assert books.status(again) is Status.PROTECTED
    assert books.releasable() == {G1}


def test_workers_that_are_all_in_one_domain_still_get_buffers_back():
    books = books_.store_joined(pushed(group(), G1), "c", "node-a")
    books = books_.group_formed(books_.attempt_started(books, 2)[0], 2, "ac")
    again = Generation(2, 1, 20)
    books = hold(hold(books, "a", again, *OWN["a"]), "c", again, *OWN["b"])
    assert books.status(again) is Status.PROTECTED
    assert books.releasable() == {G1}


STORES = "abc"
PARTS = ("h0", "h1", "s0>1")


@st.composite
def any_books(draw: st.DrawFn) -> Books:
    books = Books(copies=draw(st.integers(1, 3)))
    for name in STORES:
        books = books_.store_joined(books, name, draw(st.sampled_from("xyz")))
    books = books_.attempt_started(books, 1)[0]
    books = books_.group_formed(books, 1, draw(st.sets(st.sampled_from(STORES), min_size=1)))
    books = books_.draining(books, draw(st.sets(st.sampled_from(STORES))))
    for generation in (G1, G2):
        for store in STORES:
            parts = frozenset(draw(st.sets(st.sampled_from(PARTS))))
            if parts:
                books = books_.held(books, Held(store, generation, 2, parts, frozenset(PARTS), "x"))
    return books


@given(any_books())
def test_replaces_means_exactly_surviving_every_loss_of_domains_that_the_older_survives(books):
    if not {G1, G2} <= books.entries.keys():
        return
    domains = sorted(set(books.domains.values()))
    losses = [set(gone) for n in range(books.wanted()) for gone in combinations(domains, n)]

    def survives(generation: Generation, gone: set[str], drained: frozenset[str]) -> bool:
        left = books
        for store in [name for name, domain in books.domains.items() if domain in gone or name in drained]:
            left = books_.store_lost(left, store)
        return generation in left.complete()

    cases = [(gone, drained) for gone in losses for drained in {frozenset[str](), books.leaving()}]
    expected = survives(G2, set(), frozenset()) and all(survives(G2, *case) for case in cases if survives(G1, *case))
    assert books.replaces(G2, G1) == expected


@given(any_books())
def test_freeing_what_is_releasable_never_loses_the_newest_complete_generation(books):
    newest = books.complete()[:1]
    assert books_.released(books, books.releasable()).complete()[:1] == newest


def three() -> Books:
    """Rank 0 on a, rank 1 on b, rank 2 on c; step 10 is protected: each part on its own store and the next one."""
    books = Books(copies=2)
    for name in "abc":
        books = books_.store_joined(books, name, f"node-{name}")
    books = books_.group_formed(books_.attempt_started(books, 1)[0], 1, "abc")
    return spread(books, G1, {"h0": "ab", "h1": "bc", "h2": "ca"})


def spread(books: Books, generation: Generation, parts: dict[str, str]) -> Books:
    everything = frozenset(parts)
    for store in "abc":
        mine = frozenset(part for part, stores in parts.items() if store in stores)
        if mine:
            books = books_.held(books, Held(store, generation, 3, mine, everything, "x"))
    return books


def test_copies_on_a_draining_store_are_served_but_do_not_count():
    books = books_.draining(three(), "b")
    assert books.status(G1) is Status.COMPLETE
    assert books.undercovered(G1) == {"h0": {"a", "b"}, "h1": {"b", "c"}}
    assert books.receivers().keys() == {"a", "c"}
    assert choose_push(books.undercovered(G1), books.lasting(), books.receivers(), books.wanted()) == [
        ("h0", "a", "c"),
        ("h1", "b", "a"),
    ]
    moved = spread(books, G1, {"h0": "ac", "h1": "ca", "h2": "ca"})
    assert moved.status(G1) is Status.PROTECTED
    assert books_.store_died(moved, "b").complete() == [G1]


def test_what_only_draining_stores_hold_of_a_newer_generation_frees_no_older_one():
    books = books_.draining(spread(three(), G2, {"h0": "ab", "h1": "b", "h2": "ca"}), "b")
    assert books.status(G2) is Status.COMPLETE
    assert books.releasable() == frozenset()
    assert spread(books, G2, {"h0": "ac", "h1": "ca", "h2": "ca"}).releasable() == {G1}


def test_with_nowhere_else_to_go_draining_stores_count_like_any_store():
    books = books_.draining(three(), "abc")
    assert books.status(G1) is Status.PROTECTED
    assert books.receivers().keys() == set("abc")


def test_a_drained_store_among_two_leaves_one_domain_to_be_protected_in():
    books = books_.draining(both(group(), G1), "b")
    assert books.wanted() == 1
    assert books.status(G1) is Status.COMPLETE
    assert hold(books, "a", G1, *OWN["a"], *OWN["b"]).status(G1) is Status.PROTECTED


def test_while_no_group_is_known_every_living_store_may_receive():
    books = books_.store_joined(books_.store_joined(Books(copies=2), "a", "x"), "b", "y")
    assert books.receivers() == {"a": "x", "b": "y"}


@pytest.mark.parametrize("lost", list("ab"))
def test_books_are_what_the_inventories_say_in_whatever_order_they_come(lost):
    reports = [("a", G1), ("b", G1), ("a", G2), ("b", G2)]
    forwards, backwards = group(), group()
    for store, generation in reports:
        forwards = hold(forwards, store, generation)
    for store, generation in reversed(reports):
        backwards = hold(backwards, store, generation)
    assert books_.store_lost(forwards, lost) == books_.store_lost(backwards, lost)


def test_the_death_of_the_only_holder_of_a_part_abandons_what_was_not_replicated():
    books = both(pushed(group(), G1), G2)
    books = books_.store_died(books, "b")
    assert books.releasable() == {G2}
    assert books.complete() == [G1]
    assert "died" in books.abandoned[G2]


def test_a_store_that_was_silent_when_it_was_decided_brings_back_nothing_newer_than_the_choice():
    books = pushed(group(), G1)
    without = books_.store_lost(books_.store_lost(books, "a"), "b")
    for name in "ab":
        without = books_.store_joined(without, name, f"node-{name}")
    without, choice = books_.attempt_started(pushed(without, G1), 2)
    assert choice == G1
    back = both(without, G2)
    assert back.complete() == [G1]
    assert back.releasable() == {G2}


def three_with_a_generation_half_pushed() -> Books:
    """Of the older one all but c's part is in two domains, of the newer one a's part only."""
    books = Books(copies=2)
    for name in "abc":
        books = books_.store_joined(books, name, name)
    books = books_.group_formed(books_.attempt_started(books, 1)[0], 1, "abc")
    everything = frozenset({"h0", "h1", "h2"})
    for generation, holders in ((G1, {"h0": "ab", "h1": "bc", "h2": "c"}), (G2, {"h0": "ab", "h1": "b", "h2": "c"})):
        for name in "abc":
            parts = frozenset(part for part, stores in holders.items() if name in stores)
            books = books_.held(books, Held(name, generation, 3, parts, everything, "x"))
    return books


def test_nothing_is_freed_that_a_silent_store_would_be_needed_for():
    books = three_with_a_generation_half_pushed()
    assert books.releasable() == frozenset()
    # If a is dead, the loss of b loses both generations. If it only does not answer, the older one would be left.
    assert books_.store_lost(books, "a").releasable() == {G1}
    silent = books_.store_silent(books, "a")
    assert silent.complete() == [G2, G1]
    assert silent.releasable() == frozenset()
    everything = frozenset({"h0", "h1", "h2"})
    for name in "bc":
        copied = silent = books_.held(silent, Held(name, G2, 3, everything, everything, "x"))
    assert copied.releasable() == {G1}


@pytest.mark.parametrize("end", [books_.store_lost, books_.store_died])
def test_a_silent_store_that_ends_is_waited_for_no_more(end):
    silent = books_.store_silent(three_with_a_generation_half_pushed(), "a")
    assert end(silent, "a").silent == {}
    assert end(silent, "a").releasable() == {G1}
    assert books_.store_joined(silent, "a", "a").silent == {}


def test_a_silent_store_that_nobody_has_heard_may_have_any_part_of_what_is_older():
    books = books_.store_silent(books_.store_lost(three_with_a_generation_half_pushed(), "a"), "a")
    assert books.complete() == [G2, G1]
    assert books.releasable() == frozenset()
    everything = frozenset({"h0", "h1", "h2"})
    for name in "bc":
        books = books_.held(books, Held(name, G2, 3, everything, everything, "x"))
    assert books.releasable() == {G1}
