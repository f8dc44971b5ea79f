"""Announced snapshots: whatever is late, repeated or lost, ranks agree about which step is one."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jax_ckpt.model import announce
from ray_jax_ckpt.model.announce import Call, Named, Pledge, Position, Verdict


@dataclass
class Group:
    """Ranks that go through the same positions, and a coordinator whose words come in order, and twice at times."""

    positions: list[Position]
    size: int
    ranks: list[Pledge] = field(default_factory=list)
    call: Call | None = None
    named: list[Named] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [Pledge() for _ in range(self.size)]
        self.at = [0] * self.size
        self.words: list[deque] = [deque() for _ in range(self.size)]
        self.answers: list[tuple[int, int, Position]] = []
        self.due: dict[Position, set[int]] = defaultdict(set)
        self.leaving: dict[Position, dict[int, frozenset[int]]] = defaultdict(dict)
        self.missed: set[tuple[int, Position]] = set()
        self.held: set[int] = set()
        self.ballot = 0

    def step(self, rank: int) -> None:
        if self.at[rank] == len(self.positions):
            return
        position = self.positions[self.at[rank]]
        self.ranks[rank], verdict = announce.arrive(self.ranks[rank], position)
        if verdict is Verdict.HOLD:
            self.held.add(rank)
            return
        self.held.discard(rank)
        self.at[rank] += 1
        self.leaving[position][rank] = self.ranks[rank].leaving
        if verdict is Verdict.DUE:
            self.due[position].add(rank)

    def begin(self, leaving: int) -> None:
        if self.call is None:
            self.ballot += 1
            self.call = Call(self.ballot, frozenset(range(self.size)), frozenset({leaving}))
            self._tell(("called", self.call.ballot))

    def end(self) -> None:
        """In time or because somebody was silent for too long."""
        if self.call is not None:
            named = self.call.outcome()
            self.named += [named] if named else []
            self._tell(("over", self.call.ballot, named))
            self.call = None

    def _tell(self, word) -> None:
        for queue in self.words:
            queue.append(word)

    def hear(self, rank: int, ahead: int, again: bool) -> None:
        if not self.words[rank]:
            return
        word = self.words[rank][0] if again else self.words[rank].popleft()
        if word[0] == "called":
            self.ranks[rank] = announce.called(self.ranks[rank], word[1], ahead)
            ceiling = self.ranks[rank].ceiling
            if ceiling is not None and self.ranks[rank].ballot == word[1]:
                self.answers.append((word[1], rank, ceiling))
        else:
            self.ranks[rank], missed = announce.over(self.ranks[rank], *word[1:])
            if missed is not None:
                self.missed.add((rank, missed))

    def answer(self, number: int, again: bool) -> None:
        if self.answers and self.call is not None:
            number %= len(self.answers)
            self.call = announce.pledged(self.call, *(self.answers[number] if again else self.answers.pop(number)))

    def finish(self) -> None:
        """Everything arrives, and everybody goes on to the end."""
        for rank in range(self.size):
            while self.words[rank]:
                self.hear(rank, 1, False)
        while self.answers and self.call is not None:
            self.answer(0, False)
        self.end()
        for rank in range(self.size):
            while self.words[rank]:
                self.hear(rank, 1, False)
            while self.at[rank] < len(self.positions):
                self.step(rank)
                assert rank not in self.held


@st.composite
def histories(draw: st.DrawFn, alone: bool = False) -> Group:
    stride = draw(st.integers(1, 4))
    steps = [stride * n for n in range(draw(st.integers(3, 14)))]
    back = draw(st.integers(0, len(steps) - 1))
    group = Group([(0, s) for s in steps] + [(1, s) for s in steps[back:]], draw(st.integers(1, 3)))
    ranks, again = st.integers(0, group.size - 1), st.booleans()
    events = st.one_of(
        st.tuples(st.just("step"), ranks),
        st.tuples(st.just("step"), ranks),
        st.tuples(st.just("hear"), ranks, st.integers(1, 5), again),
        st.tuples(st.just("answer"), st.integers(0, 9), again),
        st.tuples(st.just("begin"), ranks),
        st.just(("end",)),
        *([st.tuples(st.just("alone"), ranks)] if alone else []),
    )
    for name, *arguments in draw(st.lists(events, max_size=80)):
        if name == "alone":
            # Only a rank that waits at its ceiling loses patience.
            if arguments[0] in group.held:
                group.ranks[arguments[0]] = announce.go_alone(group.ranks[arguments[0]])
        else:
            getattr(group, name)(*arguments)
    group.finish()
    return group


@settings(max_examples=300)
@given(histories())
def test_ranks_never_disagree_about_which_snapshots_are_announced_and_how_they_are_placed(group):
    everybody = set(range(group.size))
    firsts = [next((p for p in group.positions if p >= named.position), None) for named in group.named]
    assert {position for position, ranks in group.due.items() if ranks} == set(firsts) - {None}
    assert all(ranks == everybody for ranks in group.due.values())
    assert all(len(set(by_rank.values())) == 1 for by_rank in group.leaving.values())
    assert group.missed == set()


@settings(max_examples=300)
@given(histories(alone=True))
def test_a_rank_that_lost_patience_calls_off_what_it_missed_and_agrees_again_afterwards(group):
    for position, ranks in group.due.items():
        absent = set(range(group.size)) - ranks
        assert {(rank, position) for rank in absent} <= group.missed
    last = group.positions[-1]
    if group.named and not any(position >= last for _, position in group.missed):
        assert len(set(group.leaving[last].values())) == 1


def test_nothing_is_named_while_somebody_has_not_pledged():
    call = announce.pledged(Call(1, frozenset({0, 1})), 1, 0, (0, 5))
    assert call.outcome() is None
    assert call.silent() == [1]
    assert announce.pledged(call, 1, 1, (0, 9)).outcome() == Named(1, (0, 9))
    assert announce.without(call, [1]).outcome() == Named(1, (0, 5))
    assert announce.without(call, [0, 1]).outcome() is None


def test_a_rank_waits_at_its_ceiling_only_until_the_call_is_over():
    pledge, _ = announce.arrive(Pledge(), (0, 10))
    pledge = announce.called(pledge, 1, 2)
    pledge, verdict = announce.arrive(pledge, (0, 11))
    assert verdict is Verdict.PASS
    assert announce.arrive(pledge, (0, 12))[1] is Verdict.HOLD
    pledge, missed = announce.over(pledge, 1, Named(1, (0, 13), frozenset({1})))
    assert missed is None
    assert announce.arrive(pledge, (0, 12))[1] is Verdict.PASS
    pledge, verdict = announce.arrive(pledge, (0, 20))
    assert verdict is Verdict.DUE
    assert pledge.leaving == {1}
    assert announce.arrive(pledge, (0, 20))[1] is Verdict.PASS


@pytest.mark.parametrize(("pace", "steps"), [(None, 1), (60.0, 1), (0.5, 1), (0.1, 5), (0.01, 50), (0.0, 5000)])
def test_a_ceiling_is_half_a_second_ahead_and_for_slow_steps_the_next_one(pace, steps):
    assert announce.margin(pace) == steps
