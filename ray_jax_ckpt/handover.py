"""How a worker learns, before its train function, what its attempt restores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray.train

from ray_jax_ckpt import _ray_compat, session
from ray_jax_ckpt.checkpoint import UndecidedCheckpoint
from ray_jax_ckpt.errors import NoSessionError
from ray_jax_ckpt.memory.messages import Decision
from ray_jax_ckpt.model.choice import Tier
from ray_jax_ckpt.start_hook import Wiring

_reported: list[Any] = []


def arm(wiring: Wiring) -> None:
    """See `start_hook.arm`."""
    session.become(wiring)
    before = _ray_compat.set_checkpoint(UndecidedCheckpoint())
    _reported.append(before)


def turn_off() -> None:
    """See `start_hook.turn_off`."""
    session.become(session.OFF)


def decide(decision: Decision) -> None:
    """See `start_hook.decide`."""
    wiring = session.peek()
    if not isinstance(wiring, Wiring):
        raise NoSessionError("A decision came before its worker was armed.")
    current = session.Session(wiring, decision, _ray_compat.world_rank())
    checkpoint = _checkpoint_of(decision, current, _reported.pop())
    if checkpoint is None and decision.needed:
        session.become(replace(wiring, problem=decision.needed))
        _ray_compat.set_checkpoint(UndecidedCheckpoint(decision.needed))
        return
    current.offered = getattr(checkpoint, "path", "")
    session.become(current)
    _ray_compat.set_checkpoint(checkpoint)


def _checkpoint_of(decision: Decision, current: session.Session, reported: Any) -> Any:
    """What `get_checkpoint()` gives. The same on all ranks: nothing is looked at here but the decision.

    Args:
        decision: The group's.
        current: This worker's session.
        reported: What Ray would give.
    """
    if decision.located is not None:
        return current.handle(decision.located.generation)
    kept = reported if decision.ray_counts else None
    stored = decision.stored
    if stored is None or (stored.tier is Tier.GIVEN and kept is not None):
        return kept
    return ray.train.Checkpoint(stored.path, filesystem=stored.filesystem)
