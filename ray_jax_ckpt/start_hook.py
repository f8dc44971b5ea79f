"""What the controller has its workers do before the train function. Imported where JAX must not be."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorHandle

from ray_jax_ckpt.config import PersistConfig, SnapshotConfig
from ray_jax_ckpt.memory.messages import Decision


@dataclass(frozen=True)
class Wiring:
    """What is known when the decision is still being made.

    Attributes:
        coordinator: The run's.
        config: The user's.
        persist: The user's.
        problem: Why there is no decision to wait for any more; "" while there is.
    """

    coordinator: ActorHandle
    config: SnapshotConfig
    persist: PersistConfig | None = None
    problem: str = ""


def arm(wiring: Wiring) -> None:
    """First call on a worker: until the decision is here, nobody may take `None` for an answer."""
    from ray_jax_ckpt import handover

    handover.arm(wiring)


def decide(decision: Decision) -> None:
    """Second call, with the decision: from now on `get_checkpoint()` gives what is restored."""
    from ray_jax_ckpt import handover

    handover.decide(decision)


def turn_off() -> None:
    """Only call on a worker of a run without snapshots (`RAY_JAX_CKPT_ENABLED=0`): the calls do nothing."""
    from ray_jax_ckpt import handover

    handover.turn_off()


def store_last(timeout_s: float) -> None:
    """After a train function that has returned: its last snapshot may still be on its way to the store."""
    from ray_jax_ckpt import session

    session.current().drain(timeout_s)
