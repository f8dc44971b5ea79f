"""From stored bytes back to a tree of arrays, on whatever mesh the template asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.capture import batched_copy
from ray_jax_ckpt.arrays.skeleton import Skeleton, rebuild
from ray_jax_ckpt.errors import SnapshotLostError, TreeMismatchError
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import Catalog, Stored, Want
from ray_jax_ckpt.model.shards import Box, box_of, extent, volume, whole

logger = logging.getLogger(__name__)

_MAX_PATHS = 10

Fetch = Callable[[Sequence[Want], Sequence[np.dtype]], Sequence[np.ndarray]]
"""Returns one array per wanted box, possibly a read-only view of memory that is valid until the restore ends."""


@dataclass(frozen=True)
class Options:
    """How a template is met: see `ray_jax_ckpt.restore`."""

    partial: bool = False
    cast: bool = False


@dataclass
class Target:
    """A leaf to be made.

    Attributes:
        spec: What was saved.
        number: Which leaf it was.
        kind: What is wanted: as in `LeafSpec.kind`.
        dtype: Wanted element type (of the data, for keys).
        sharding: Where it goes; None for the default device, uncommitted.
        places: Per addressable device, the box it gets.
        first: Position of its first wanted box.
    """

    spec: tree.LeafSpec
    number: int
    kind: str
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = None
    places: list[tuple[Any, Box]] = field(default_factory=list)
    first: int = 0

    @property
    def boxes(self) -> list[Box]:
        """The distinct boxes, in a fixed order."""
        return list(dict.fromkeys(box for _, box in self.places))


class Assembler:
    """Builds one rank's state from a catalog of stored items.

    Args:
        indices: One index per rank of the group that took the snapshot, in rank order.
        rank: The restoring rank.
        world_size: Of the restoring group.
    """

    def __init__(self, indices: Sequence[Index], rank: int, world_size: int) -> None:
        self._indices, self._rank, self._world_size = indices, rank, world_size
        self._own = indices[rank] if rank < len(indices) else indices[0]
        self._catalog = Catalog.of(indices)
        self._specs = [tree.LeafSpec.from_json(dict(leaf)) for leaf in self._own.layout.leaves]

    def restore(self, template: Any, shardings: Any, options: Options, fetch: Fetch) -> Any:
        """The state in the template's structure; with no template numpy arrays in dictionaries and lists.

        Raises:
            TreeMismatchError: Template and snapshot do not fit each other.
            SnapshotLostError: `fetch` or the catalog lacks bytes.
        """
        if template is None:
            return self._without_template(fetch)
        flat = tree.flatten(template)
        problem = tree.mismatch(self._specs, flat, partial=options.partial, cast=options.cast)
        if problem is not None:
            raise TreeMismatchError(
                f"The snapshot of step {self._own.generation.step} does not fit the template:\n{problem}"
            )
        numbers = {spec.path: number for number, spec in enumerate(self._specs)}
        wanted = _broadcast(shardings, flat)
        saved = [i for i, leaf in enumerate(flat.leaves) if not tree.is_static(leaf)]
        self._check_own(numbers[flat.paths[i]] for i in saved)
        targets = [self._target(numbers[flat.paths[i]], flat.leaves[i], wanted[i]) for i in saved]
        leaves = dict(enumerate(flat.leaves)) | dict(zip(saved, self._build(targets, fetch), strict=True))
        return jax.tree_util.tree_unflatten(flat.treedef, leaves.values())

    def _without_template(self, fetch: Fetch) -> Any:
        skeleton = Skeleton.from_json(self._own.layout.skeleton)
        keys = [spec.path for spec in self._specs if spec.kind == "key"]
        lost = [*skeleton.lost, *([f"PRNG keys at {', '.join(keys[:3])}"] if keys else [])]
        if lost:
            logger.warning(
                "Restored without a template: nodes of other classes than dict, list and tuple came back as "
                "dictionaries or lists, keys as their data. Pass abstract_state= to get back %s.",
                "; ".join(lost),
            )
        self._check_own(range(len(self._specs)))
        targets = [self._to_numpy(number) for number in range(len(self._specs))]
        return rebuild(self._specs, self._build(targets, fetch), skeleton)

    def _to_numpy(self, number: int) -> Target:
        spec = self._specs[number]
        kind = "value" if spec.kind == "value" else "numpy"
        return Target(spec, number, kind, _data_dtype(spec), None, [(None, whole(self._data_shape(number)))])

    def _target(self, number: int, leaf: Any, sharding: Any) -> Target:
        spec = self._specs[number]
        if spec.kind == "value":
            return Target(spec, number, "value", np.dtype(np.uint8))
        shape = self._data_shape(number)
        # A sharding for all leaves is not meant for those on the host: JAX has no strings, and narrows 64 bits.
        if isinstance(leaf, np.ndarray) and (sharding is None or spec.kind == "numpy"):
            return Target(spec, number, "numpy", leaf.dtype, None, [(None, whole(shape))])
        if sharding is None and not (isinstance(leaf, jax.Array) and not leaf.committed):  # pyright: ignore
            sharding = getattr(leaf, "sharding", None)
        kind = "key" if spec.kind == "key" else "array"
        dtype = _data_dtype(spec) if kind == "key" else np.dtype(leaf.dtype)
        _check_representable(spec, dtype)
        if sharding is None:
            self._check_placeable(number)
            return Target(spec, number, kind, dtype, None, [(None, whole(shape))])
        return Target(spec, number, kind, dtype, sharding, _places(sharding, spec, shape))

    def _check_placeable(self, number: int) -> None:
        if self._world_size > 1 and number not in self._own.layout.local:
            raise TreeMismatchError(
                f"{self._specs[number].path}: the snapshot has a global array, and the template does not say how to "
                "shard it over several processes. Give the template's ShapeDtypeStructs shardings, or pass "
                "shardings=."
            )

    def _data_shape(self, number: int) -> tuple[int, ...]:
        """Shape of the stored data: that of the leaf, and for keys the dimensions of their data behind it."""
        spec = self._specs[number]
        if spec.kind != "key":
            return spec.shape
        box = next((stored.item.box for stored in self._candidates(number)), ())
        return spec.shape + tuple(stop for _, stop in box[len(spec.shape) :])

    def _candidates(self, number: int) -> Sequence[Stored]:
        if number not in self._own.layout.local:
            return self._catalog.shared[number]
        if len(self._indices) == self._world_size:
            return self._catalog.local[self._rank, number]
        # Equal on all: it was checked.
        return self._catalog.local[self._own.layout.rank, number]

    def _check_own(self, numbers: Iterable[int]) -> None:
        """What every process had to itself can be handed out in a group of another size if it was equal everywhere."""
        if len(self._indices) == self._world_size:
            return
        found = {number: self._difference(number) for number in numbers if number in self._own.layout.local}
        problems = [f"{self._specs[number].path} ({why})" for number, why in found.items() if why]
        if problems:
            more = f" and {len(problems) - _MAX_PATHS} more" if len(problems) > _MAX_PATHS else ""
            raise TreeMismatchError(
                f"Each of {len(self._indices)} processes snapshotted these leaves for itself, so {self._world_size} "
                f"processes cannot share them out: {', '.join(problems[:_MAX_PATHS])}{more}. Only what is known to be "
                "equal on all of them could be. Make them global arrays on a mesh over all processes, put per-process "
                "state into data=, leave them out of the template (partial=True), or restore in a group of "
                f"{len(self._indices)}."
            )

    def _difference(self, number: int) -> str:
        """Why a leaf that every process had to itself does not count as equal everywhere; empty if it does."""
        first, *others = self._indices
        expected = [(s.item.box, s.digest) for s in self._catalog.local[first.layout.rank, number]]
        for index in others:
            rank = index.layout.rank
            pieces = [(s.item.box, s.digest) for s in self._catalog.local[rank, number]]
            if any(not digest for _, digest in expected + pieces):
                return "not compared: SnapshotConfig(verify=False) keeps no digests"
            described = first.layout.leaves[number], first.values.get(number)
            if pieces != expected or described != (index.layout.leaves[number], index.values.get(number)):
                return f"rank {rank}'s differs from rank {first.layout.rank}'s"
        return ""

    def _build(self, targets: Sequence[Target], fetch: Fetch) -> list[Any]:
        wants, dtypes = [], []
        for target in targets:
            target.first = len(wants)
            saved = _data_dtype(target.spec)
            if target.kind != "value":
                wants += [Want(box, self._candidates(target.number), saved.itemsize) for box in target.boxes]
                dtypes += [saved] * len(target.boxes)
        boxes = self._boxes(targets, wants, dtypes, fetch)
        leaves = self._device_leaves(targets, boxes)
        return [leaves[i] if i in leaves else self._host_leaf(target, boxes) for i, target in enumerate(targets)]

    def _boxes(
        self, targets: Sequence[Target], wants: Sequence[Want], dtypes: Sequence[np.dtype], fetch: Fetch
    ) -> list[np.ndarray]:
        """One array per wanted box. One without elements needs no bytes, and any number of stored ones meets it."""
        asked = [i for i, want in enumerate(wants) if volume(want.box)]
        try:
            arrays = fetch([wants[i] for i in asked], [dtypes[i] for i in asked])
        except KeyError as error:
            raise SnapshotLostError(self._not_held(targets, asked[int(error.args[0])])) from None
        found = dict(zip(asked, arrays, strict=True))
        return [found[i] if i in found else np.empty(extent(w.box), dtypes[i]) for i, w in enumerate(wants)]

    def _not_held(self, targets: Sequence[Target], position: int) -> str:
        target = max((t for t in targets if t.first <= position and t.kind != "value"), key=lambda t: t.first)
        return f"No living store holds all of leaf {target.spec.path} of step {self._own.generation.step}."

    def _host_leaf(self, target: Target, boxes: Sequence[np.ndarray]) -> Any:
        if target.kind == "value":
            return tree.decode_value(self._own.values[target.number])
        return np.array(boxes[target.first], dtype=target.dtype)

    def _device_leaves(self, targets: Sequence[Target], boxes: Sequence[np.ndarray]) -> dict[int, jax.Array]:
        """All device arrays in one batched transfer: a call per leaf would dominate for trees of many small ones."""
        sources, destinations, owners = [], [], []
        for position, target in enumerate(targets):
            if target.kind not in ("array", "key"):
                continue
            order = {box: target.first + i for i, box in enumerate(target.boxes)}
            for device, box in target.places:
                sources.append(_as(boxes[order[box]], target.dtype))
                destinations.append(_single(device, target.sharding))
                owners.append(position)
        moved = _owned(jax.device_put(sources, destinations)) if sources else []
        pieces: dict[int, list[jax.Array]] = {}
        for position, array in zip(owners, moved, strict=True):
            pieces.setdefault(position, []).append(array)
        # A process that none of an array's devices belong to still gets the (empty) array.
        everywhere = [i for i, target in enumerate(targets) if target.kind in ("array", "key")]
        return {i: self._finish(targets[i], pieces.get(i, [])) for i in everywhere}

    def _finish(self, target: Target, pieces: list[jax.Array]) -> jax.Array:
        if target.sharding is None:
            array = pieces[0]
        else:
            shape = self._data_shape(target.number)
            physical = _data_sharding(target.sharding, target.spec)
            array = jax.make_array_from_single_device_arrays(shape, physical, pieces, dtype=target.dtype)
        if target.kind == "key":
            return tree.wrap_key(array, str(target.spec.key_impl))
        return tree.with_weak_type(array, target.spec.weak_type and target.dtype == _data_dtype(target.spec))


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


def _data_dtype(spec: tree.LeafSpec) -> np.dtype:
    return np.dtype(np.uint8) if spec.kind == "value" else np.dtype(spec.dtype)


def _check_representable(spec: tree.LeafSpec, dtype: np.dtype) -> None:
    """JAX would narrow what it has no dtype for, in silence."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TreeMismatchError(
            f"{spec.path}: the template wants {dtype}, which JAX has only with jax_enable_x64. Enable it, give a numpy "
            "array as the template's leaf, or a narrower dtype together with cast=True."
        )


def _places(sharding: jax.sharding.Sharding, spec: tree.LeafSpec, shape: tuple[int, ...]) -> list[tuple[Any, Box]]:
    """Each addressable device and the box of the stored data that it gets."""
    tail = whole(shape[len(spec.shape) :])
    try:
        indices = sharding.addressable_devices_indices_map(spec.shape)
    except ValueError as error:
        raise TreeMismatchError(
            f"{spec.path}: the snapshot has {spec}, which cannot be sharded as asked: {error}"
        ) from error
    return [(device, box_of(index or (), spec.shape) + tail) for device, index in indices.items()]


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


def _as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array if array.dtype == dtype else array.astype(dtype)


def _broadcast(shardings: Any, flat: tree.Flat) -> list[Any]:
    """One sharding or None per leaf: from a single one, or a tree that is a prefix of the template's."""
    if shardings is None:
        return [None] * len(flat.leaves)
    template = jax.tree_util.tree_unflatten(flat.treedef, range(len(flat.leaves)))
    spread: list[Any] = [None] * len(flat.leaves)

    def spread_over(sharding: Any, leaves: Any) -> None:
        if not isinstance(sharding, jax.sharding.Sharding | None):
            raise ValueError(f"{sharding!r} is no jax.sharding.Sharding")
        for number in jax.tree_util.tree_leaves(leaves):
            spread[number] = sharding

    try:
        # None stands for "as the template says", and is a leaf here; the template's own None is left to the prefix's.
        jax.tree_util.tree_map(spread_over, shardings, template, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        raise TreeMismatchError(f"shardings= is not a prefix of the template: {error}") from error
    return spread
