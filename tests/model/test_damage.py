"""The books on copies that are bad: damaged ones, and replicas that ranks captured differently."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.recovery import choose_push
from ray_jax_ckpt.model.shards import Generation

G = Generation(1, 0, 10)
SHARED = "s0.1>"  # captured by both ranks


def group(**settings) -> Books:
    books = Books(copies=2, **settings)
    for name in "ab":
        books = books_.store_joined(books, name, f"node-{name}")
    return books_.group_formed(books_.attempt_started(books, 1)[0], 1, "ab")


def report(store: str, digest: str, generation: Generation = G, **changes) -> Held:
    """All host parts, and the shared part as the store's own rank captured it."""
    rank = "ab".index(store)
    parts = frozenset({SHARED, "h0", "h1"})
    told = Held(store, generation, 2, parts, parts, "x", "", frozenset(), {SHARED: digest}, {SHARED: (rank, digest)})
    return replace(told, **changes)


def tell(books: Books, *reports: Held) -> Books:
    for one in reports:
        books = books_.held(books, one)
    return books


def test_a_damaged_copy_does_not_count_until_the_store_says_that_it_is_good_again():
    books = tell(group(), report("a", "d"), report("b", "d"))
    assert books.status(G) is Status.PROTECTED
    bad = report("b", "d", parts=frozenset({"h0", "h1"}), damaged=frozenset({SHARED}), digests={})
    books = tell(books, bad)
    assert books.status(G) is Status.COMPLETE
    assert books.undercovered(G) == {SHARED: frozenset("a")}
    assert books.entries[G].damaged[SHARED] == frozenset("b")
    books = tell(books, report("b", "d"))
    assert books.status(G) is Status.PROTECTED
    assert not any(books.entries[G].damaged.values())


def test_what_is_damaged_everywhere_is_not_restored():
    bad = {"parts": frozenset({"h0", "h1"}), "damaged": frozenset({SHARED}), "digests": {}}
    older = replace(G, step=5)
    books = tell(group(), report("a", "d", older), report("b", "d", older), report("a", "d", **bad))
    books = tell(books, report("b", "d", **bad))
    assert books_.attempt_started(books, 2)[1] == older


def test_replicas_that_differ_leave_the_lowest_ranks_copy_whatever_comes_first():
    for order in permutations([report("a", "right"), report("b", "wrong")]):
        books = tell(group(), *order)
        assert books.status(G) is Status.COMPLETE
        assert books.entries[G].holders[SHARED] == frozenset("a")
        assert books.entries[G].differing() == {SHARED: frozenset("b")}
        # It says the same again before it has heard of it.
        assert tell(books, order[1], order[0]).entries[G].holders[SHARED] == frozenset("a")
        repaired = report("b", "right", claims={SHARED: (1, "wrong")})
        books = tell(books, repaired)
        assert books.status(G) is Status.PROTECTED
        assert not books.entries[G].differing()


def test_a_copy_that_differs_does_not_free_the_older_generation():
    older = replace(G, step=5)
    books = tell(group(), report("a", "d", older), report("b", "d", older), report("a", "right"), report("b", "wrong"))
    assert books.releasable() == frozenset()
    assert tell(books, report("b", "right")).releasable() == {older}


def test_the_lowest_ranks_word_counts_when_its_own_store_is_gone():
    # Its host part has been pushed, and its index with it; its copy of the shared part died with the store.
    other = report("b", "wrong", claims={SHARED: (0, "right")})
    assert tell(group(), other).status(G) is Status.PENDING


@pytest.mark.parametrize("order", [0, 1])
def test_replicas_that_differ_may_be_a_reason_to_abandon_the_generation(order):
    reports = [report("a", "right"), report("b", "wrong")]
    books = tell(group(reject_differing=True), reports[order], reports[1 - order])
    assert books.status(G) is Status.ABANDONED
    assert "['s0.1>'] differ" in books.abandoned[G]
    assert G in books.releasable()
    assert tell(group(reject_differing=True), report("a", "d"), report("b", "d")).status(G) is Status.PROTECTED


def test_parts_without_digests_are_not_compared():
    bare = {"digests": {}, "claims": {}}
    books = tell(group(reject_differing=True), report("a", "", **bare), report("b", "", **bare))
    assert books.status(G) is Status.PROTECTED


def test_a_store_that_is_gone_has_nothing_to_repair():
    books = tell(group(), report("a", "right"), report("b", "wrong"))
    assert books.entries[G].damaged == {SHARED: frozenset("b")}
    books = books_.store_lost(books, "b")
    assert not any(books.entries[G].damaged.values())
    assert not books.entries[G].differing()


def test_a_copy_is_made_again_where_there_is_room_for_it():
    domains = {"a": "x", "b": "y", "c": "y", "d": "y"}
    lacking = {"p": frozenset("a")}
    assert choose_push(lacking, domains, domains, 2, {"p": frozenset("c")}) == [("p", "a", "c")]
    assert choose_push(lacking, domains, domains, 2) == [("p", "a", "b")]
