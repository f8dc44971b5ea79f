"""Which snapshot is written to storage, when, and which checkpoints are removed again: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.model import results
from ray_jax_ckpt.model.shards import Generation

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


def pause_s(failures: int, *, ending: bool = False) -> float:
    """How long to wait after so many failures in a row, at least one; not long when the run is `ending`."""
    if ending:
        return FIRST_PAUSE_S
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))


@dataclass(frozen=True)
class Progress:
    """What has been due, as far as cadence is concerned.

    Attributes:
        generation: The last one that was due by cadence, or that the group restored; None before the first.
        at_s: When that was, on the clock that `is_due` is asked with.
    """

    generation: Generation | None
    at_s: float


@dataclass(frozen=True)
class Persisted:
    """A checkpoint on storage.

    Attributes:
        generation: What it is of.
        metrics: Of rank 0.
        path: Of its directory.
        num_bytes: Of its files; None: not known.
    """

    generation: Generation
    metrics: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: str = ""
    num_bytes: int | None = None


def is_due(config: PersistConfig, generation: Generation, progress: Progress, now_s: float) -> bool:
    """Whether a complete snapshot is to be written by cadence."""
    last = progress.generation
    if last is not None and generation <= last:
        return False
    if config.every_s is not None and now_s - progress.at_s >= config.every_s:
        return True
    if config.every_n_steps is None:
        return False
    base = 0 if last is None else last.step
    if base >= generation.step:
        # Training went back within its attempt, nobody knows here how far.
        base = generation.step - 1
    return generation.step // config.every_n_steps > base // config.every_n_steps


def superfluous(
    config: PersistConfig, found: Iterable[Persisted], restored: Generation | None = None, attempt: int = 0
) -> list[Persisted]:
    """Checkpoints that are to be removed, oldest first. The newest one never is.

    Args:
        config: What stays.
        found: All.
        restored: What the present attempt restores. It may be read still, and what is newer may be what earlier
            attempts have crashed with: it stays until there is one of this attempt.
        attempt: The present one.
    """
    known = {str(one.generation): one for one in found}
    got_on = any(one.generation.attempt >= attempt for one in known.values())
    protected = frozenset[str]() if restored is None or got_on else frozenset({str(restored)})
    entries = map(_entry, known.values())
    return [known[entry.key] for entry in results.superfluous(policy_of(config), entries, protected)]


def policy_of(config: PersistConfig) -> results.Policy:
    """What of a user's settings says what stays."""
    return results.Policy(
        config.num_to_keep, config.score_attribute, config.score_order, keep_every_n_steps=config.keep_every_n_steps
    )


def _entry(one: Persisted) -> results.Entry:
    return results.Entry(str(one.generation), one.generation, one.generation.step, metrics=one.metrics)
