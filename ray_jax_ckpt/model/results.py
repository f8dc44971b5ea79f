"""What is known of a run's checkpoints: which are on their way, which can be restored, which are to go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ray_jax_ckpt.model.metrics import score_of


class Status(StrEnum):
    """How far a checkpoint has come.

    Attributes:
        PENDING: It is being written.
        VALIDATING: It is written, and being validated.
        COMPLETE: It is written; nobody asked for a validation.
        VALIDATED: It is written, and has passed its validation.
        FAILED: It could not be written.
        TIMED_OUT: It was not written in time.
        INVALID: It is written, and its validation failed.
        VALIDATION_TIMED_OUT: It is written, and was not validated in time.
        LOST: It was written, and is not there any more, or not as it was written.
    """

    PENDING = "pending"
    VALIDATING = "validating"
    COMPLETE = "complete"
    VALIDATED = "validated"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INVALID = "invalid"
    VALIDATION_TIMED_OUT = "validation_timed_out"
    LOST = "lost"

    @property
    def is_pending(self) -> bool:
        """Whether something is still to come: nobody removes it."""
        return self in (Status.PENDING, Status.VALIDATING)

    @property
    def is_verified(self) -> bool:
        """Whether nothing is to come, and it can be restored: only such ones count among those that are kept."""
        return self in (Status.COMPLETE, Status.VALIDATED)

    @property
    def is_restorable(self) -> bool:
        """Whether all of it is on storage, and nothing speaks against it."""
        return self.is_verified or self is Status.VALIDATING

    @property
    def is_rejected(self) -> bool:
        """Whether it is on storage, and its validation speaks against it."""
        return self in (Status.INVALID, Status.VALIDATION_TIMED_OUT)


@dataclass(frozen=True)
class Policy:
    """Which checkpoints stay.

    Attributes:
        num_to_keep: How many: the best, or the newest. None: all.
        score_attribute: Name or path of the metric that says which are the best. None: the newest are.
        score_order: Whether "max" or "min" of it is best.
        keep_every_n_steps: Those at multiples of this stay for ever, beside the others.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"
    keep_every_n_steps: int | None = None


@dataclass(frozen=True)
class Entry:
    """A checkpoint, as far as ranking it goes.

    Attributes:
        key: Tells it from others.
        age: Grows with time: report index or generation, the same kind for all.
        step: The training step, if known.
        status: How far it has come.
        metrics: That its score is among.
    """

    key: str
    age: Any
    step: int | None = None
    status: Status = Status.COMPLETE
    metrics: Mapping[str, Any] = field(default_factory=dict, hash=False)


def ranked(policy: Policy, entries: Iterable[Entry]) -> list[Entry]:
    """Worst first; of equals the older one. Without a score by age.

    With one, a checkpoint that has no finite number for it, or is not verified, is worse than all that are and have.
    """
    return sorted(entries, key=lambda entry: _rank(policy, entry))


def _rank(policy: Policy, entry: Entry) -> tuple[bool, float, Any]:
    name = policy.score_attribute
    score = score_of(entry.metrics, name) if name is not None and entry.status.is_verified else None
    if score is None:
        return False, 0.0, entry.age
    return True, score if policy.score_order == "max" else -score, entry.age


def newest(entries: Iterable[Entry]) -> Entry | None:
    """The newest one that can be restored."""
    return max((entry for entry in entries if entry.status.is_restorable), key=lambda entry: entry.age, default=None)


def superfluous(policy: Policy, entries: Iterable[Entry], protected: Collection[str] = ()) -> list[Entry]:
    """Checkpoints that are to be removed, oldest first.

    Only verified ones count among those that stay, so there always is one when there was one: the newest never goes.
    What is being written or validated never goes. What its validation rejected goes when a newer one is verified.

    Args:
        policy: What stays.
        entries: All.
        protected: Keys of those that are somebody else's to remove.
    """
    known = sorted(entries, key=lambda entry: entry.age)
    verified = [entry for entry in known if entry.status.is_verified]
    if policy.num_to_keep is None or not verified:
        return []
    counted = [entry for entry in verified if not _stays(policy, entry)]
    count = {entry.key for entry in counted}
    stay = {entry.key for entry in ranked(policy, counted)[-policy.num_to_keep :]} | {verified[-1].key}
    return [
        entry
        for entry in known
        if entry.key not in protected
        and ((entry.key in count and entry.key not in stay) or _is_outdated(entry, verified[-1]))
    ]


def _is_outdated(entry: Entry, latest: Entry) -> bool:
    return entry.status.is_rejected and entry.age < latest.age


def _stays(policy: Policy, entry: Entry) -> bool:
    every = policy.keep_every_n_steps
    return every is not None and entry.step is not None and entry.step % every == 0
