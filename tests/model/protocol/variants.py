"""Rules broken on purpose, in the modules that the running code uses, and how far one has to look to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.books import Books, Silent, Status
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Phase, Slots
from tests.model.protocol.draft import Bounds

Patch = pytest.MonkeyPatch

TWO = ((("a", "b"),), (("a", "b"),))
ONCE = ((("a", "b"),),)
THREE = ((("a", "b", "c"),), (("a", "b", "c"),))
MOVED = ((("a", "b"),), (("a", "c"),))


@dataclass(frozen=True)
class Variant:
    """A broken rule.

    Attributes:
        breaks: Puts it in place of the right one.
        bounds: Where the right rule holds and this one does not.
        finds: What the counterexample says.
    """

    breaks: Callable[[Patch], None]
    bounds: Bounds
    finds: str


def kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


VARIANTS: dict[str, Variant] = {}


def variant(bounds: Bounds, finds: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
        VARIANTS[breaks.__name__] = Variant(breaks, bounds, finds)
        return breaks

    return register


STUCK = "liveness: the last step never becomes protected"


@variant(Bounds(TWO, steps=2, faults=1, kinds=kinds(), repairs=False, slow=1), STUCK)
def freed_when_a_newer_one_is_protected(patch: Patch) -> None:
    """A crash that leaves the newest ones unpushed leaves no buffer for any other."""
    patch.setattr(
        Books, "replaces", lambda self, newer, older: newer > older and self.status(newer) is Status.PROTECTED
    )


@variant(Bounds(ONCE, faults=0, forced=frozenset({1}), repairs=False), STUCK)
def pushed_in_any_order(patch: Patch) -> None:
    """Some peers get this one and others that: none of the two ever gets all its copies."""

    def take(queue: pushes.Queue, lane: str) -> tuple[pushes.Queue, pushes.PushJob | None]:
        backwards = replace(queue, jobs=queue.jobs[::-1])
        rest, job = right(backwards, lane)
        return replace(rest, jobs=rest.jobs[::-1]), job

    right = pushes.take
    patch.setattr(pushes, "take", take)


@variant(Bounds(ONCE, steps=2, faults=0), "I1: ")
def ones_own_newer_copy_is_enough(patch: Patch) -> None:
    """The rank that is ahead frees the last generation that all have."""

    def commit(slots: Slots, key: int, attempt: int) -> Slots:
        slots = right(slots, key, attempt)
        done = slots.used[key]
        older = [s.generation for s in slots.used.values() if s.source == done.source]
        return slots_.release(slots, [generation for generation in older if generation < done.generation])

    right = slots_.commit
    patch.setattr(slots_, "commit", commit)


@variant(Bounds(MOVED, steps=2, faults=1, kinds=kinds()), STUCK)
def every_loss_counts(patch: Patch) -> None:
    """What also lies in a store that serves nobody any more is never replaced."""
    patch.setattr(
        books_, "_outlives", lambda newer, older, wanted: all(any(weak <= strong for weak in older) for strong in newer)
    )


@variant(Bounds(TWO, faults=2, kinds=kinds("skip", "stall")), "I2: ")
def the_oldest_of_the_ranks_newest_is_restored(patch: Patch) -> None:
    """It is one that some rank never took."""

    def attempt_started(books: Books, attempt: int) -> tuple[Books, Generation | None]:
        newest: dict[str, Generation] = {}
        for generation in sorted(books.entries):
            newest |= {part: generation for part, stores in books.entries[generation].holders.items() if stores}
        choice = min(newest.values(), default=None)
        books = right(books, attempt)[0]
        return replace(books, decided=(attempt, choice)), choice

    right = books_.attempt_started
    patch.setattr(books_, "attempt_started", attempt_started)


@variant(Bounds(TWO, steps=1, faults=2, kinds=kinds("kill_store")), "I2: ")
def records_of_what_was_stored_decide(patch: Patch) -> None:
    """A store that died is still on record."""
    patch.setattr(books_, "store_joined", _join_without_forgetting)
    patch.setattr(books_, "store_lost", lambda books, store: books)
    patch.setattr(books_, "store_died", lambda books, store: books)


def _join_without_forgetting(
    books: Books, store: str, domain: str, attempt: int = 0, incarnation: str = "", number: int = 0
) -> Books:
    heard = books_.Heard(number, number)
    return replace(
        books,
        domains={**books.domains, store: domain},
        incarnations={**books.incarnations, store: incarnation},
        heard={**books.heard, store: heard},
        attempt=max(books.attempt, attempt),
    )


@variant(Bounds(TWO, steps=1, faults=2, kinds=kinds("stall")), "I7: ")
def an_ended_attempt_may_commit(patch: Patch) -> None:
    """A worker that was taken for dead finishes its copy."""
    patch.setattr(slots_, "check_attempt", lambda slots, attempt: None)
    patch.setattr(slots_, "fence", lambda slots, attempt: replace(slots, attempt=max(attempt, slots.attempt)))


@variant(Bounds(TWO, steps=1, faults=2, kinds=kinds("stall")), "I7: ")
def a_buffer_passes_on_while_its_writer_may_live(patch: Patch) -> None:
    """A copy that was stalled goes on into what another generation is written to."""

    def fence(slots: Slots, attempt: int) -> Slots:
        slots = right(slots, attempt)
        return replace(slots, used={k: s for k, s in slots.used.items() if s.phase is not Phase.STRANDED})

    right = slots_.fence
    patch.setattr(slots_, "fence", fence)


@variant(Bounds(ONCE, steps=2, faults=0, forced=frozenset({1})), "lease: ")
def a_release_ignores_leases(patch: Patch) -> None:
    """What a handle keeps, or a push sends, is overwritten."""

    def release(slots: Slots, generations: frozenset[Generation]) -> Slots:
        gone = set(generations)
        return replace(
            slots,
            used={k: s for k, s in slots.used.items() if s.generation not in gone or s.phase is not Phase.HELD},
        )

    patch.setattr(slots_, "release", release)


@variant(Bounds(TWO, steps=1, faults=1, kinds=kinds(), forced=frozenset({1})), "I7: ")
def leases_outlive_their_attempt(patch: Patch) -> None:
    """Nobody is left who would end them."""
    right = slots_.fence
    patch.setattr(slots_, "fence", lambda slots, attempt: replace(right(slots, attempt), leases=slots.leases))


@variant(Bounds(ONCE, steps=2, faults=2, kinds=kinds("delay", "kill_store")), "I7: ")
def reports_of_a_dead_store_count(patch: Patch) -> None:
    """The empty store that has its name is thought to hold what the dead one held."""

    def held(books: Books, report: books_.Held) -> Books:
        return right(books, replace(report, incarnation=books.incarnations.get(report.store, "")))

    right = books_.held
    patch.setattr(books_, "held", held)


@variant(Bounds(TWO, steps=2, faults=1, kinds=kinds()), STUCK)
def what_an_ended_attempt_left_half_done_is_kept(patch: Patch) -> None:
    """Nobody completes it, and its buffers never come free."""

    def attempt_started(books: Books, attempt: int) -> tuple[Books, Generation | None]:
        after, choice = right(books, attempt)
        return replace(after, abandoned=books.abandoned, decided=None), choice

    right = books_.attempt_started
    patch.setattr(books_, "attempt_started", attempt_started)


@variant(Bounds(ONCE, steps=2, faults=1, kinds=kinds("kill_store")), STUCK)
def what_only_a_dead_store_held_is_waited_for(patch: Patch) -> None:
    """It never comes, and its buffers never come free."""
    patch.setattr(books_, "store_died", books_.store_lost)
    patch.setattr(Books, "passed", lambda self: frozenset())


@variant(Bounds(ONCE, steps=2, faults=3, kinds=kinds("stall", "skip", "kill_coordinator")), STUCK)
def a_word_that_got_lost_is_waited_for(patch: Patch) -> None:
    """A rank that skipped a step says so once; the coordinator that heard it was killed."""
    patch.setattr(Books, "passed", lambda self: frozenset())


@variant(Bounds(ONCE, steps=2, faults=1, kinds=kinds("rollback")), STUCK)
def the_higher_step_is_newer(patch: Patch) -> None:
    """After a rollback nothing replaces the old line's last step."""
    patch.setattr(Generation, "__lt__", lambda self, other: self.step < other.step)
    patch.setattr(Generation, "__gt__", lambda self, other: self.step > other.step)
    patch.setattr(Generation, "__le__", lambda self, other: self.step <= other.step)
    patch.setattr(Generation, "__ge__", lambda self, other: self.step >= other.step)


@variant(Bounds(ONCE, steps=4, faults=0, kinds=kinds("stall", "skip"), skips_freely=True), "I4: ")
def busy_ranks_skip_whenever_they_like(patch: Patch) -> None:
    """In turns, so that no generation is ever complete."""
    patch.setattr(Books, "must_wait", lambda self: False)


@variant(Bounds(TWO, steps=1, faults=2, kinds=kinds("silence")), "I2: ")
def silent_stores_are_done_without(patch: Patch) -> None:
    """They hold what is restored."""
    patch.setattr(Books, "does_without", lambda self, silent, dead: True)


@variant(Bounds(THREE, steps=2, faults=2, ahead=1, kinds=kinds("silence")), "I1: ")
def silent_stores_are_forgotten(patch: Patch) -> None:
    """They hold what is needed when another one is lost."""
    patch.setattr(books_, "store_silent", books_.store_lost)


@variant(Bounds(THREE, steps=2, faults=2, ahead=1, kinds=kinds("silence", "kill_coordinator")), "I1: ")
def silent_stores_that_nobody_has_heard_have_nothing(patch: Patch) -> None:
    """A coordinator that was killed has heard of none."""
    has = Silent.has
    patch.setattr(
        Silent, "has", lambda self, generation, part, if_unheard: has(self, generation, part, if_unheard=False)
    )


@variant(Bounds(ONCE, steps=2, faults=2, kinds=kinds("kill_coordinator", "kill_store"), learns=False), STUCK)
def a_coordinator_that_was_killed_does_not_know_the_group(patch: Patch) -> None:
    """It cannot give a rank whose store died another one."""


@variant(Bounds(TWO, steps=2, faults=1, kinds=kinds(), repairs=False), STUCK)
def what_was_restored_is_not_copied_again(patch: Patch) -> None:
    """A crash left it half pushed: it replaces nothing, and nothing has a buffer."""
