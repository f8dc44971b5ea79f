"""What a restore gives back, from memory or from storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_jax_ckpt.data_state import Reshard, put_back, reshard


@dataclass(frozen=True)
class Restored:
    """What `restore` gives back.

    Attributes:
        state: The state, in the template's structure.
        step: The step it was snapshotted at; training goes on at the next. None only for a directory of plain Orbax
            whose name says no step.
        data: This rank's `data` state as it was saved; with another number of processes than saved it, what it was
            resharded to, or None if nothing was.
        data_by_rank: Every rank's, of the group that took the snapshot. From storage it is read when it is asked for,
            and raises what `restore` raises.
        metrics: This rank's metrics, scalar arrays as Python numbers.
        source: The slowest tier that bytes came from: "memory:local", "memory:peer" or "storage".
    """

    state: Any = field(repr=False)
    step: Any
    data: Any = field(repr=False)
    data_by_rank: Mapping[int, Any] = field(repr=False)
    metrics: Mapping[str, Any]
    source: str


def give_data(data: Any, states: Mapping[int, Any], function: Reshard | None, *, rank: int, world_size: int) -> Any:
    """This rank's saved `data`, which the objects in `data` get back: resharded, in a group of another size.

    Args:
        data: What gets it; None for nothing.
        states: What every rank of the group that saved had.
        function: How it is resharded; see `ray_jax_ckpt.restore`.
        rank: This process's.
        world_size: Of the group that restores.

    Raises:
        DataStateError: It cannot be put back, or nothing says how to reshard it.
    """
    if len(states) == world_size:
        own = states[rank]
    elif data is None and function is None:
        own = None
    else:
        own = reshard(data, states, rank, world_size, function)
    if data is not None:
        put_back(data, own)
    return own
