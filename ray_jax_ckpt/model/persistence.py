"""Which snapshot is written to storage, when, and which checkpoints are removed again: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.model.shards import Generation


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
    """

    generation: Generation
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    path: str = ""


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


def superfluous(config: PersistConfig, found: Iterable[Persisted]) -> list[Persisted]:
    """Checkpoints that are to be removed, oldest first. The newest one never is."""
    known = sorted(found, key=lambda one: one.generation)
    if config.num_to_keep is None or not known:
        return []
    counted = [one for one in known if not _stays(config, one)]
    best = {one.generation for one in _ranked(config, counted)[: config.num_to_keep]}
    return [one for one in counted if one.generation not in best and one is not known[-1]]


def _stays(config: PersistConfig, one: Persisted) -> bool:
    return config.keep_every_n_steps is not None and one.generation.step % config.keep_every_n_steps == 0


def _ranked(config: PersistConfig, found: Sequence[Persisted]) -> list[Persisted]:
    """Best first; of equals the newer one."""
    newest_first = sorted(found, key=lambda one: one.generation, reverse=True)
    name = config.score_attribute
    if name is None:
        return newest_first
    sign = -1.0 if config.score_order == "max" else 1.0

    def rank(one: Persisted) -> tuple[bool, float]:
        score = one.metrics.get(name, math.nan)
        return math.isnan(score), 0.0 if math.isnan(score) else sign * score

    return sorted(newest_first, key=rank)
