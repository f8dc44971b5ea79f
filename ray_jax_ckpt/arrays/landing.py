"""From boxes of host bytes to leaves on devices: in batches, so that a restore takes little beyond what it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.capture import batched_copy
from ray_jax_ckpt.model.shards import Box

BATCH_BYTES = 256 << 20
"""Bytes that are fetched before they are put in place; a larger box is a batch of its own."""


@dataclass
class Target:
    """A leaf to be made.

    Attributes:
        spec: What was saved.
        number: Which leaf it was.
        kind: What is wanted: as in `LeafSpec.kind`.
        dtype: Wanted element type (of the data, for keys).
        shape: Of the data.
        sharding: Where it goes; None for the default device, uncommitted.
        places: Per addressable device, the box it gets.
    """

    spec: tree.LeafSpec
    number: int
    kind: str
    dtype: np.dtype
    shape: tuple[int, ...] = ()
    sharding: jax.sharding.Sharding | None = None
    places: list[tuple[Any, Box]] = field(default_factory=list)

    @property
    def boxes(self) -> list[Box]:
        """The distinct boxes, in a fixed order."""
        return list(dict.fromkeys(box for _, box in self.places))

    @property
    def saved(self) -> np.dtype:
        """Element type of the stored data."""
        return data_dtype(self.spec)


class Landing:
    """Takes boxes as they come and makes leaves of them. What it was given may be reused when `take` has returned."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._pieces: dict[int, list[Any]] = {}

    def take(self, boxes: Sequence[tuple[int, Box]], arrays: Sequence[np.ndarray]) -> None:
        """Puts boxes (number of the target, box) where they belong. Blocks until the bytes have arrived there.

        All device arrays go in one batched transfer: a call per leaf would dominate for trees of many small ones.
        """
        sources, destinations, owners = [], [], []
        for (number, box), array in zip(boxes, arrays, strict=True):
            target = self._targets[number]
            if target.kind == "numpy":
                self._pieces[number] = [np.array(array, dtype=target.dtype)]
                continue
            data = array if array.dtype == target.dtype else array.astype(target.dtype)
            for device in (device for device, its in target.places if its == box):
                sources.append(data)
                destinations.append(_single(device, target.sharding))
                owners.append(number)
        moved = _owned(jax.device_put(sources, destinations)) if sources else []
        for number, array in zip(owners, moved, strict=True):
            self._pieces.setdefault(number, []).append(array)

    def leaf(self, number: int) -> Any:
        """A target whose boxes have all been taken."""
        target = self._targets[number]
        # A process that none of an array's devices belong to still gets the (empty) array.
        pieces = self._pieces.pop(number, [])
        if target.kind == "numpy":
            return pieces[0]
        if target.sharding is None:
            array = pieces[0]
        else:
            physical = _data_sharding(target.sharding, target.spec)
            array = jax.make_array_from_single_device_arrays(target.shape, physical, pieces, dtype=target.dtype)
        if target.kind == "key":
            return tree.wrap_key(array, str(target.spec.key_impl))
        return tree.with_weak_type(array, target.spec.weak_type and target.dtype == target.saved)


def batches(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cuts a series into ranges (first, stop) whose sum is at most `limit`, or that have one element."""
    first, total = 0, 0
    for position, size in enumerate(sizes):
        if position > first and total + size > limit:
            yield first, position
            first, total = position, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)


def _owned(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays in memory of their own, when their bytes have arrived.

    JAX makes an array on CPU from an aligned numpy array without copying it, whatever `may_alias` says. Such an array
    would change with the buffer, which will be reused, and could not be donated. Of an array it makes a true copy.
    """
    owned = list(arrays)
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        if next(iter(array.devices())).platform == "cpu":
            groups.setdefault(array.sharding if array.committed else None, []).append(i)
    for sharding, members in groups.items():
        aliases = [arrays[i] for i in members]
        free = sharding is None
        copies = jax.device_put(aliases, may_alias=False) if free else batched_copy(aliases, sharding)
        for i, copy in zip(members, copies, strict=True):
            owned[i] = copy
    return jax.block_until_ready(owned)


def data_dtype(spec: tree.LeafSpec) -> np.dtype:
    """Element type of a leaf's stored data."""
    return np.dtype(np.uint8) if spec.kind == "value" else np.dtype(spec.dtype)


def _data_sharding(sharding: jax.sharding.Sharding, spec: tree.LeafSpec) -> jax.sharding.Sharding:
    """The sharding of a key array's data: the dimensions behind the key's own are not sharded."""
    if spec.kind != "key" or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    dims = tuple(sharding.spec) + (None,) * (len(spec.shape) - len(sharding.spec))
    named = jax.sharding.PartitionSpec(*dims)
    return jax.sharding.NamedSharding(sharding.mesh, named, memory_kind=sharding.memory_kind)


def _single(device: Any, sharding: jax.sharding.Sharding | None) -> Any:
    if sharding is None:
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
