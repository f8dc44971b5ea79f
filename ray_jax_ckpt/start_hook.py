"""What the controller has its workers do before the train function. Imported where JAX must not be."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorHandle

from ray_jax_ckpt.config import PersistConfig, SnapshotConfig
from ray_jax_ckpt.memory.messages import Decision


@dataclass(frozen=True)
class Wiring:
    """What is known when the decision is still being made."""

    coordinator: ActorHandle
    config: SnapshotConfig
    persist: PersistConfig | None = None


def arm(wiring: Wiring) -> None:
    """First call on a worker: until the decision is here, nobody may take `None` for an answer."""
    from ray_jax_ckpt import session

    session.arm(wiring)


def decide(decision: Decision) -> None:
    """Second call, with the decision: from now on `get_checkpoint()` gives what is restored."""
    from ray_jax_ckpt import session

    session.decide(decision)


def store_last(timeout_s: float) -> None:
    """After a train function that has returned: its last snapshot may still be on its way to the store."""
    from ray_jax_ckpt import session

    session.current().drain(timeout_s)
