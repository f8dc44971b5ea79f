"""`restore` of what lies on storage, in a train function or anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ray_jax_ckpt import _ray_compat
from ray_jax_ckpt.data_state import Reshard
from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError
from ray_jax_ckpt.memory.messages import StoredCheckpoint
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.restored import Restored, give_data
from ray_jax_ckpt.session import Session
from ray_jax_ckpt.storage.restore import TIMEOUT_S, Loaded, load

Ask = Callable[[Session, Any, float], Any]


@dataclass(frozen=True)
class Wish:
    """What `restore` was asked for; see there."""

    abstract_state: Any
    data: Any
    partial: bool
    cast: bool
    shardings: Any
    reshard_data: Reshard | None
    filesystem: Any
    timeout_s: float | None


def restore_stored(checkpoint: Any, wish: Wish, session: Session | None, ask: Ask) -> Restored:
    """Brings a checkpoint back from storage.

    Args:
        checkpoint: Where it is.
        wish: How.
        session: Of this worker, if it is one of a run with a `CheckpointManager`: then all ranks call this, and it
            returns when all have restored the same. Else every process is on its own.
        ask: Asks the run's coordinator, so that what fails is a RestoreError.
    """
    if session is None:
        rank, world_size = _ray_compat.group() or (jax.process_index(), jax.process_count())
        return _give(_load(checkpoint, wish, rank, world_size), wish, rank, world_size)
    session.record("restore_begin", step=None, path=str(checkpoint))
    try:
        loaded = _load(checkpoint, wish, session.rank, session.world_size)
        restored = _give(loaded, wish, session.rank, session.world_size)
        _confirm(session, loaded, wish.timeout_s or TIMEOUT_S, ask)
    except BaseException as error:
        if isinstance(error, IntegrityError | NoCheckpointError) and _is_at(checkpoint, session.offered):
            # The next attempt is not to fail in the same way. What else a train function looks for says nothing of it.
            session.coordinator.suspect_stored.remote(session.offered, session.decision.attempt, f"{error!r:.300}")
        session.coordinator.let_go.remote(session.rank, session.decision.attempt, f"{error!r:.300}")
        raise
    session.restored(loaded.step)
    session.record("restore_end", step=loaded.step, source=loaded.source)
    return restored


def _is_at(checkpoint: Any, path: str) -> bool:
    """Whether a checkpoint, as `restore` takes it, is the one at a path."""
    where = checkpoint[0] if isinstance(checkpoint, tuple) else checkpoint
    given = str(getattr(where, "path", where)).partition("?")[0].rstrip("/")
    return bool(path) and (given == path.rstrip("/") or given.endswith(f"://{path.strip('/')}"))


def _load(checkpoint: Any, wish: Wish, rank: int, world_size: int) -> Loaded:
    return load(
        checkpoint,
        wish.abstract_state,
        rank=rank,
        world_size=world_size,
        partial=wish.partial,
        cast=wish.cast,
        shardings=wish.shardings,
        filesystem=wish.filesystem,
        timeout_s=wish.timeout_s or TIMEOUT_S,
    )


def _give(loaded: Loaded, wish: Wish, rank: int, world_size: int) -> Restored:
    own = give_data(wish.data, loaded.data_by_rank, wish.reshard_data, rank=rank, world_size=world_size)
    metrics = loaded.metrics.get(rank, loaded.metrics.get(0, {}))
    return Restored(loaded.state, loaded.step, own, loaded.data_by_rank, dict(metrics), loaded.source)


def _confirm(session: Session, loaded: Loaded, timeout_s: float, ask: Ask) -> None:
    """Ranks that read different directories, or different steps of one, are told before they train."""
    faults.reach("confirm", loaded.step or 0)
    found = StoredCheckpoint(loaded.path, loaded.step)
    number = session.restores + 1
    confirmed = session.coordinator.confirm.remote(session.rank, session.decision.attempt, number, found, timeout_s)
    ask(session, confirmed, timeout_s)
