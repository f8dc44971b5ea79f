"""What a new worker group restores, seen over many attempts: pure decisions, and how they are said."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args

from ray_jax_ckpt.config import ResumeMode
from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.model.books import Books, abandoned
from ray_jax_ckpt.model.shards import Generation

MAX_CRASHES = 2
"""So many attempts that restored a generation may fail in the same way before the next older one is taken."""
MAX_TRIALS = 32
MAX_KIND = 200

_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+")


class Tier(StrEnum):
    """Where a generation is restored from."""

    MEMORY = "memory"
    STORAGE = "storage"
    RAY = "ray"
    GIVEN = "given"


@dataclass(frozen=True)
class Resume:
    """What the user wants of a run that has been there before. See `CheckpointManager`.

    Attributes:
        mode: "auto", "never" or "must".
        place: What to begin with, as `restore` takes it.

    Raises:
        ConfigError: There is no such mode.
    """

    mode: ResumeMode = "auto"
    place: Any = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(ResumeMode):
            raise ConfigError(f"resume={self.mode!r}: say one of {', '.join(map(repr, get_args(ResumeMode)))}.")


@dataclass(frozen=True)
class Trial:
    """An attempt that has been made.

    Attributes:
        attempt: Its number.
        restored: What all its ranks have restored; None if nothing, or not all of them got that far.
        newest: The newest generation that was complete when it ended.
        crash: The kinds of errors that its workers failed with by themselves. None if they ended well, were preempted
            or resized, or went with their nodes.
    """

    attempt: int
    restored: Generation | None = None
    newest: Generation | None = None
    crash: frozenset[str] = frozenset()

    @property
    def fruitless(self) -> bool:
        """Whether it restored something, and failed before anything newer was complete."""
        return bool(self.crash) and self.restored is not None and not self._got_on

    @property
    def _got_on(self) -> bool:
        return self.restored is not None and self.newest is not None and self.newest > self.restored


@dataclass(frozen=True)
class Crashes:
    """What attempts that restored the same generation have in common.

    Attributes:
        kind: Of error.
        attempts: Their numbers.
    """

    kind: str
    attempts: tuple[int, ...]


def crash_kind(error: str) -> str:
    """What is the same of an error when it comes again: its first line without numbers, such as addresses and times."""
    return _NUMBERS.sub("#", error.strip().partition("\n")[0])[:MAX_KIND]


def crashing(trials: Iterable[Trial]) -> dict[Generation, Crashes]:
    """Generations that seem to lead to a crash, the same one each time, and the attempts that say so.

    An attempt that got on from one clears it, whatever the others did.
    """
    by_generation: dict[Generation, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.restored is not None:
            by_generation[trial.restored].append(trial)
    found: dict[Generation, Crashes] = {}
    for generation, concerned in by_generation.items():
        if any(trial._got_on for trial in concerned):
            continue
        count = Counter(kind for trial in concerned if trial.fruitless for kind in sorted(trial.crash))
        kind, number = next(iter(count.most_common(1)), ("", 0))
        if number >= MAX_CRASHES:
            attempts = (trial.attempt for trial in concerned if trial.fruitless and kind in trial.crash)
            found[generation] = Crashes(kind, tuple(attempts))
    return found


def rank(generation: Generation, avoided: Collection[Generation]) -> tuple[bool, Generation]:
    """Greater is better: newer, but what is avoided comes last. That is better still than the beginning."""
    return generation not in avoided, generation


def passed_over(books: Books, first_attempt: int, avoided: Collection[Generation]) -> Books:
    """The books without what is not to be restored from memory.

    Args:
        books: What the stores hold.
        first_attempt: Of the run as it was started anew; what is of earlier ones is given up.
        avoided: These are given up where another complete generation can be restored instead.
    """
    for generation in books.entries:
        if generation.attempt < first_attempt:
            books = abandoned(books, generation, "the run was started anew (resume='never')")
    complete = books.complete()
    if all(generation in avoided for generation in complete):
        return books
    for generation in set(complete).intersection(avoided):
        books = abandoned(books, generation, "attempts that restored it failed before anything newer was complete")
    return books


def remembered(trials: Sequence[Trial], trial: Trial) -> tuple[Trial, ...]:
    """The trials with one more, or with what is known now of one of them. The oldest are forgotten."""
    others = [one for one in trials if one.attempt != trial.attempt]
    return tuple([*others, trial][-MAX_TRIALS:])


@dataclass(frozen=True)
class Announcement:
    """What is said of a decision.

    Attributes:
        run: Name of the run.
        attempt: Which.
        generation: What is restored; None: nothing.
        tier: From where.
        place: Where on storage.
        age_s: Since it was taken; None: nobody knows.
        lost_steps: Between it and the newest one that is known to have been begun.
        mode: What the user wants of what has been there before.
        needed: Why training cannot start without anything; "" if it can.
    """

    run: str
    attempt: int
    generation: Generation | None
    tier: Tier | None = None
    place: str = ""
    age_s: float | None = None
    lost_steps: int | None = None
    mode: ResumeMode = "auto"
    needed: str = ""

    def __str__(self) -> str:
        head = f"Run {self.run}, attempt {self.attempt}: "
        if self.generation is None:
            return head + (self.needed or self._of_nothing())
        if self.tier is Tier.GIVEN:
            return head + f"restores {self.place}, as resume_from says."
        lost = "" if self.lost_steps is None else f", at least {self.lost_steps} steps lost"
        age = "taken by an earlier driver" if self.age_s is None else f"taken {self.age_s:.0f} s ago"
        where = "memory" if self.tier is Tier.MEMORY else f"storage, {self.place}"
        return head + f"restores step {self.generation.step} from {where} (generation {self.generation}, {age}{lost})."

    def _of_nothing(self) -> str:
        if self.mode == "never":
            return (
                "starts from the beginning, since resume='never' has nothing restored that earlier drivers have made: "
                "their snapshots in memory and checkpoints on storage, if there are any, are left aside."
            )
        return "starts from the beginning, nothing to restore was found in memory or on storage."


def steps_lost(restored: Generation, begun: Iterable[Generation]) -> int | None:
    """Steps between what is restored and what was begun last in its line; None if nothing else is known of that."""
    newest = max(begun, default=None)
    return None if newest is None or newest < restored else max(0, newest.step - restored.step)
