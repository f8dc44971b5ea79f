"""What stores say may arrive late, twice, or in another order: the books end up with what the stores hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Statement, Status
from ray_jax_ckpt.model.shards import Generation

G1, G2, G3 = (Generation(1, 0, step) for step in (10, 20, 30))


def group() -> Books:
    books = Books(copies=2)
    for name in "ab":
        books = books_.store_joined(books, name, f"node-{name}", 1, name, 0)
    return books_.group_formed(books_.attempt_started(books, 1)[0], 1, "ab")


def report(store: str, generation: Generation, *parts: str, number: int = 1) -> Held:
    return Held(store, generation, 2, frozenset(parts), frozenset(parts), "", store, number=number)


def statement(store: str, number: int, **held: tuple[str, ...]) -> Statement:
    reports = tuple(report(store, Generation(1, 0, int(g[1:])), *parts, number=number) for g, parts in held.items())
    return Statement(store, store, number, reports)


def test_what_a_store_does_not_name_any_more_it_does_not_hold():
    books = books_.held(books_.held(group(), report("a", G1, "h0")), report("b", G1, "h1"))
    assert books.complete() == [G1]
    books = books_.stated(books, statement("b", 2))
    assert books.complete() == []
    assert books.missing(G1) == ["h1"]


def test_a_report_from_before_a_statement_brings_nothing_back():
    books = books_.stated(group(), statement("a", 5, g20=("h0",)))
    assert books_.held(books, report("a", G1, "h0", number=4)) == books


def test_a_statement_that_a_report_has_overtaken_takes_nothing_away():
    books = books_.held(group(), report("a", G1, "h0", number=6))
    books = books_.stated(books, statement("a", 5))
    assert books.entries[G1].holders["h0"] == {"a"}
    assert books_.stated(books, statement("a", 7)).entries == {}


def test_statements_of_dead_stores_and_older_ones_change_nothing():
    books = books_.stated(group(), statement("a", 5, g10=("h0",)))
    assert books_.stated(books, statement("a", 4)) == books
    dead = Statement("a", "another", 9, ())
    assert books_.stated(books, dead) == books
    assert books_.stated(books_.store_lost(books, "a"), statement("a", 9, g10=("h0",))).entries == {}


@given(
    st.lists(st.tuples(st.booleans(), st.dictionaries(st.sampled_from(["g10", "g20"]), st.just(("h0",))))), st.data()
)
def test_in_whatever_order_things_come_the_last_statement_counts(said, data):
    """A store says things one after the other; they arrive in any order, some never; then it speaks again."""
    messages = []
    for number, (whole, held) in enumerate(said, start=1):
        full = statement("a", number, **held)
        messages += [full] if whole else list(full.held)
    arriving = data.draw(st.permutations(messages))
    books = group()
    for message in arriving[: data.draw(st.integers(0, len(arriving)))]:
        books = books_.stated(books, message) if isinstance(message, Statement) else books_.held(books, message)
    last = statement("a", len(said) + 1, g30=("h0",))
    assert books_.stated(books, last).entries == books_.stated(group(), last).entries


def test_a_generation_that_a_rank_has_passed_is_known_without_a_word():
    books = books_.held(group(), report("b", G1, "h1"))
    assert books.passed() == frozenset()
    books = books_.held(books, report("a", G2, "h0"))
    assert books.passed() == {G1}
    assert books_.abandoned(books, G1, "passed").passed() == frozenset()


def test_a_part_that_an_index_announces_and_nobody_has_never_comes():
    lost = Held("a", G1, 2, frozenset({"h0"}), frozenset({"h0", "s0>1"}), "", "a")
    assert books_.held(group(), lost).passed() == {G1}


def test_a_rank_that_is_behind_may_still_come_and_one_that_rolled_back_does_not():
    books = books_.held(books_.held(group(), report("a", G1, "h0")), report("a", G2, "h0"))
    assert books.passed() == frozenset()
    assert books_.held(books, report("b", Generation(1, 1, 5), "h1")).passed() == {G1, G2}


def test_a_rank_that_gives_up_what_is_complete_all_the_same_gives_up_nothing():
    books = books_.held(books_.held(group(), report("a", G1, "h0")), report("b", G1, "h1"))
    assert books_.given_up(books, G1, "lost the answer") == books
    assert books_.given_up(books, Generation(0, 0, 30), "an ended attempt") == books
    assert books_.given_up(books, G2, "skipped").abandoned == {G2: "skipped"}


def test_books_that_were_rebuilt_learn_the_group_and_its_choice():
    books = Books(copies=2)
    for name in "abc":
        books = books_.store_joined(books, name, f"node-{name}", 2, name)
    books = books_.held(books_.held(books, report("a", G1, "h0")), report("b", G1, "h1"))
    assert books_.group_learned(books, 1, "bc", None) == books
    learned = books_.group_learned(books, 2, "bc", None)
    assert learned.receivers().keys() == {"b", "c"}
    late = books_.held(learned, report("c", G2, "h0"))
    assert late.status(G2) is Status.ABANDONED


def test_a_store_that_never_answered_cannot_be_done_without():
    books = books_.held(books_.held(group(), report("a", G1, "h0")), report("b", G1, "h1"))
    assert books.does_without([], [])
    assert not books.does_without(["b"], [])
    assert not books.does_without(["c"], [])
