"""Copies that devices make of shards before the transfer to the host: tiny ones packed together, or all of them.

A transfer of its own for each of thousands of tiny shards costs the training thread more than their bytes do. Where a
whole state is copied on the devices first, a step that donates it need not wait until it has reached the host.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger(__name__)

TINY_BYTES = 64 << 10
"""Shards below this are packed."""
MAX_OPERANDS = 256
"""Shards that one program takes: the time to compile it grows faster than their number."""
MIN_OPERANDS = 16
"""For fewer tiny shards a program is not worth its compilation."""

Place = tuple[int, int]
"""Where the bytes of a shard are: number of the staged array, and offset in it."""

# What XLA reinterprets as bytes with the same bits on every kind of device. Of sub-byte types it would pack several
# elements into one, 64-bit ones are emulated on TPUs, and complex ones it refuses.
_PACKABLE_BYTES = (1, 2, 4)


@dataclass(frozen=True)
class Group:
    """Shards of one device, by position, that one program takes. A packed one gives one array of bytes."""

    positions: tuple[int, ...]
    packed: bool


@dataclass(frozen=True)
class Staged:
    """Arrays on devices that hold shards' bytes.

    Attributes:
        arrays: To be copied to the host.
        places: Of each shard.
        is_copy: Per array, whether it is the only user of its memory: it may go to the host at any time.
    """

    arrays: list[jax.Array]
    places: list[Place]
    is_copy: list[bool]


class Staging:
    """Stages the shards of one plan, again and again.

    Until `compile` is done, and after a failure, nothing is staged: shards are passed on as they are.

    Args:
        shards: Arrays on one device each, in the order in which they will be staged. They are not kept.
        whole: Whether all shards are copied on their devices, or only the tiny ones, packed.
    """

    def __init__(self, shards: Sequence[jax.Array], *, whole: bool) -> None:
        self.whole = whole
        """Whether all shards are copied on their devices."""
        self._avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in shards]
        self._groups = _groups(self._avals, whole=whole)
        self._direct = _others(len(shards), self._groups)
        self._sizes = [x.size * np.dtype(x.dtype).itemsize for x in self._avals]
        self._programs: list[Any] | None = None
        self._failed = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to stage, and nothing has failed."""
        return bool(self._groups) and not self._failed

    @property
    def is_ready(self) -> bool:
        """Whether the next state is staged."""
        return self._programs is not None

    def compile(self) -> None:
        """Compiles what staging needs; takes seconds the first time. Any thread; never raises."""
        if self._programs is not None or not self.is_wanted:
            return
        found: dict[Any, Any] = {}
        try:
            programs = [self._program(group, found) for group in self._groups]
        except Exception as error:
            self.give_up(error)
        else:
            self._programs = programs

    def stage(self, shards: Sequence[jax.Array]) -> Staged:
        """Dispatches the copies of shards on their devices; those that are not staged are passed on."""
        programs = self._programs
        if programs is not None:
            try:
                outputs = [p(*[shards[i] for i in g.positions]) for p, g in zip(programs, self._groups, strict=True)]
            except Exception as error:
                self.give_up(error)
            else:
                return self._staged(shards, outputs)
        return Staged(list(shards), [(i, 0) for i in range(len(shards))], [False] * len(shards))

    def give_up(self, error: Exception) -> None:
        """Stages nothing any more, with a warning that says why."""
        self._programs, self._failed = None, True
        text = (
            "Snapshots are copied from the devices directly from now on, not by way of a copy on the device "
            f"({error!s:.300})."
        )
        if "RESOURCE_EXHAUSTED" in str(error):
            text += ' There is no room for that copy: use SnapshotConfig(staging="host"), or leave more memory free.'
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            # Where warnings are errors: this is no reason to lose a snapshot.
            logger.warning(text)

    def _program(self, group: Group, found: dict[Any, Any]) -> Any:
        avals = [self._avals[i] for i in group.positions]
        key = (group.packed, tuple((x.shape, x.dtype, x.sharding) for x in avals))
        if key not in found:
            function: Callable[..., Any] = _packed if group.packed else _copied
            found[key] = jax.jit(function).lower(*avals).compile()
        return found[key]

    def _staged(self, shards: Sequence[jax.Array], outputs: Sequence[Any]) -> Staged:
        arrays: list[jax.Array] = []
        places: list[Place] = [(0, 0)] * len(shards)
        for group, output in zip(self._groups, outputs, strict=True):
            offset = 0
            for number, position in enumerate(group.positions):
                places[position] = (len(arrays), offset) if group.packed else (len(arrays) + number, 0)
                offset += self._sizes[position]
            arrays += [output] if group.packed else output
        num_copies = len(arrays)
        for position in self._direct:
            places[position] = (len(arrays), 0)
            arrays.append(shards[position])
        return Staged(arrays, places, [i < num_copies for i in range(len(arrays))])


def _groups(avals: Sequence[jax.ShapeDtypeStruct], *, whole: bool) -> tuple[Group, ...]:
    tiny: dict[Any, list[int]] = defaultdict(list)
    other: dict[Any, list[int]] = defaultdict(list)
    for position, x in enumerate(avals):
        # What is in host memory already has no faster copy, and none that is closer.
        if x.size and _in_default_memory(x):
            (tiny if _is_tiny(x) else other)[x.sharding].append(position)
    groups: list[Group] = []
    for device, positions in tiny.items():
        if len(positions) < MIN_OPERANDS:
            other[device] += positions
        else:
            # Side by side, those of equal shape give groups that share a program.
            positions.sort(key=lambda i: (str(avals[i].dtype), avals[i].shape))
            groups += [Group(part, packed=True) for part in _cut(positions)]
    if whole:
        groups += [Group(part, packed=False) for positions in other.values() for part in _cut(positions)]
    return tuple(groups)


def _others(count: int, groups: Sequence[Group]) -> tuple[int, ...]:
    staged = {position for group in groups for position in group.positions}
    return tuple(i for i in range(count) if i not in staged)


def _cut(positions: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(positions[i : i + MAX_OPERANDS]) for i in range(0, len(positions), MAX_OPERANDS)]


def _in_default_memory(x: jax.ShapeDtypeStruct) -> bool:
    assert x.sharding is not None
    (device,) = x.sharding.device_set
    return x.sharding.memory_kind in (None, device.default_memory().kind)


def _is_tiny(x: jax.ShapeDtypeStruct) -> bool:
    itemsize = np.dtype(x.dtype).itemsize
    kind = np.dtype(x.dtype).kind
    whole_bytes = kind == "b" or (kind != "c" and itemsize in _PACKABLE_BYTES and not _is_sub_byte(x.dtype))
    return whole_bytes and x.size * itemsize < TINY_BYTES


def _is_sub_byte(dtype: Any) -> bool:
    try:
        bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    except ValueError:
        return True
    return bits < 8


def _packed(*shards: jax.Array) -> jax.Array:
    return jnp.concatenate([_as_bytes(x) for x in shards])


def _as_bytes(x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(flat, jnp.uint8).reshape(-1)


def _copied(*shards: jax.Array) -> list[jax.Array]:
    return [jnp.copy(x) for x in shards]
