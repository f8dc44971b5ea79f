"""From stored bytes back to a tree of arrays, on whatever mesh the template asks for."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.landing import BATCH_BYTES, Landing, Target, batches, data_dtype
from ray_jax_ckpt.arrays.skeleton import Skeleton, rebuild
from ray_jax_ckpt.errors import RestoreError, SnapshotLostError, TreeMismatchError
from ray_jax_ckpt.model.catalog import Catalog, Items
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import NotHeldError, Want
from ray_jax_ckpt.model.shards import Box, box_of, extent, volume, whole

logger = logging.getLogger(__name__)

_MAX_PATHS = 10

Fetch = Callable[[Sequence[Want], Sequence[np.dtype]], Sequence[np.ndarray]]
"""Returns one array per wanted box, possibly a view of memory that is used again by the next call.

Raises KeyError, best a `NotHeldError`, with the position of a box that cannot be had.
"""


@dataclass(frozen=True)
class Options:
    """How a template is met: see `ray_jax_ckpt.restore`."""

    partial: bool = False
    cast: bool = False


class Assembler:
    """Builds one rank's state from a catalog of stored items.

    Args:
        indices: One index per rank of the group that took the snapshot, in rank order.
        rank: The restoring rank.
        world_size: Of the restoring group.
        alike: Whether each index tells of everything that is no rank's own: others are looked at only where something
            depends on them.
        sharded: Leaves that are known to have been spread over devices. Those in several pieces always are.
    """

    def __init__(
        self,
        indices: Sequence[Index],
        rank: int,
        world_size: int,
        *,
        alike: bool = False,
        sharded: Collection[int] = (),
    ) -> None:
        self._indices, self._rank, self._world_size, self._sharded = indices, rank, world_size, sharded
        self._own = indices[rank] if rank < len(indices) else indices[0]
        self._catalog = Catalog.of([self._own] if alike else indices)
        self._places: dict[Any, list[tuple[Any, Box]]] = {}
        self._specs = [tree.LeafSpec.from_json(dict(leaf)) for leaf in self._own.layout.leaves]

    def restore(self, template: Any, shardings: Any, options: Options, fetch: Fetch) -> Any:
        """The state in the template's structure; with no template numpy arrays in dictionaries and lists.

        Raises:
            TreeMismatchError: Template and snapshot do not fit each other.
            RestoreError: `fetch` or the catalog lacks bytes: a SnapshotLostError if no store has them.
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
        self._warn_of_gathering([t for t, i in zip(targets, saved, strict=True) if _is_silent(t, flat.leaves[i])])
        leaves = dict(enumerate(flat.leaves)) | dict(zip(saved, self._build(targets, fetch), strict=True))
        return jax.tree_util.tree_unflatten(flat.treedef, leaves.values())

    def _without_template(self, fetch: Fetch) -> Any:
        skeleton = Skeleton.from_json(json.loads(self._own.layout.skeleton))
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

    def _warn_of_gathering(self, targets: Sequence[Target]) -> None:
        """What was spread over devices would all go to one, and a model that needed them does not fit there."""
        spread = [
            target for target in targets if target.number in self._sharded or len(self._candidates(target.number)) > 1
        ]
        if spread and jax.local_device_count() > 1:
            total = sum(volume(target.places[0][1]) * target.saved.itemsize for target in spread)
            warnings.warn(
                f"{len(spread)} leaves of {total} bytes, {spread[0].spec.path} first, were sharded in the snapshot of "
                f"step {self._own.generation.step}, and go to one device now because the template does not say where: "
                "nnx.eval_shape, for one, drops shardings. Give the template's ShapeDtypeStructs shardings, or pass "
                "shardings=.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _to_numpy(self, number: int) -> Target:
        spec = self._specs[number]
        kind = "value" if spec.kind == "value" else "numpy"
        shape = self._data_shape(number)
        return Target(spec, number, kind, data_dtype(spec), shape, None, [(None, whole(shape))] * (kind != "value"))

    def _target(self, number: int, leaf: Any, sharding: Any) -> Target:
        spec = self._specs[number]
        if spec.kind == "value":
            return Target(spec, number, "value", np.dtype(np.uint8))
        shape = self._data_shape(number)
        # A sharding for all leaves is not meant for those on the host: JAX has no strings, and narrows 64 bits.
        if isinstance(leaf, np.ndarray) and (sharding is None or spec.kind == "numpy"):
            return Target(spec, number, "numpy", leaf.dtype, shape, None, [(None, whole(shape))])
        if sharding is None and not (isinstance(leaf, jax.Array) and not leaf.committed):  # pyright: ignore
            sharding = getattr(leaf, "sharding", None)
        kind = "key" if spec.kind == "key" else "array"
        dtype = data_dtype(spec) if kind == "key" else np.dtype(leaf.dtype)
        _check_representable(spec, dtype)
        if sharding is None:
            self._check_placeable(number)
            return Target(spec, number, kind, dtype, shape, None, [(None, whole(shape))])
        # Few shardings and shapes serve many leaves.
        key = (sharding, spec.shape, shape)
        if key not in self._places:
            self._places[key] = _places(sharding, spec, shape)
        return Target(spec, number, kind, dtype, shape, sharding, self._places[key])

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

    def _candidates(self, number: int) -> Items:
        if number not in self._own.layout.local:
            return self._catalog.shared(number)
        if len(self._indices) == self._world_size:
            return self._catalog.local(self._rank, number)
        # Equal on all: it was checked.
        return self._catalog.local(self._own.layout.rank, number)

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
        expected = [(s.item.box, s.digest) for s in self._of_all.local(first.layout.rank, number)]
        for index in others:
            rank = index.layout.rank
            pieces = [(s.item.box, s.digest) for s in self._of_all.local(rank, number)]
            if any(not digest for _, digest in expected + pieces):
                return "not compared: SnapshotConfig(verify=False) keeps no digests"
            described = first.layout.leaves[number], first.values.get(number)
            if pieces != expected or described != (index.layout.leaves[number], index.values.get(number)):
                return f"rank {rank}'s differs from rank {first.layout.rank}'s"
        return ""

    @cached_property
    def _of_all(self) -> Catalog:
        return Catalog.of(self._indices)

    def _build(self, targets: Sequence[Target], fetch: Fetch) -> list[Any]:
        boxes = [(number, box) for number, target in enumerate(targets) for box in target.boxes]
        sizes = [volume(box) * targets[number].saved.itemsize for number, box in boxes]
        landing = Landing(targets)
        for first, stop in batches(sizes, BATCH_BYTES):
            # Nothing here may outlive its round: that it does not is what bounds the memory.
            landing.take(boxes[first:stop], self._fetched(targets, boxes[first:stop], fetch))
        return [
            tree.decode_value(self._own.values[target.number]) if target.kind == "value" else landing.leaf(position)
            for position, target in enumerate(targets)
        ]

    def _fetched(
        self, targets: Sequence[Target], boxes: Sequence[tuple[int, Box]], fetch: Fetch
    ) -> Sequence[np.ndarray]:
        """One array per box. One without elements needs no bytes, and any number of stored ones meets it."""
        of = [targets[number] for number, _ in boxes]
        asked = [i for i, (_, box) in enumerate(boxes) if volume(box)]
        wants = [Want(boxes[i][1], self._candidates(of[i].number), of[i].saved.itemsize) for i in asked]
        try:
            arrays = fetch(wants, [of[i].saved for i in asked]) if wants else []
        except KeyError as error:
            raise self._lost(of[asked[int(error.args[0])]], error) from None
        found = dict(zip(asked, arrays, strict=True))
        return [
            found[i] if i in found else np.empty(extent(box), target.saved)
            for i, ((_, box), target) in enumerate(zip(boxes, of, strict=True))
        ]

    def _lost(self, target: Target, error: KeyError) -> RestoreError:
        what = f"leaf {target.spec.path or '(the whole state)'} of step {self._own.generation.step}"
        if not isinstance(error, NotHeldError) or not error.parts:
            return SnapshotLostError(f"No living store holds all of {what}: what exists of it does not cover it.")
        if not error.said:
            return error.kind(f"No living store holds all of {what}: {', '.join(error.parts[:5])} is on none.")
        said = "; ".join(f"{name}: {text}" for name, text in error.said.items())
        return error.kind(f"No store could serve all of {what}. Asked for {', '.join(error.parts[:5])}: {said}")


def _is_silent(target: Target, leaf: Any) -> bool:
    """Whether the template says nothing of where an array goes, not even by being somewhere."""
    return target.kind in ("array", "key") and target.sharding is None and not isinstance(leaf, jax.Array)


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
    except (ValueError, IndexError) as error:
        # The second is what JAX says of a spec with more entries than the array has dimensions.
        why = "it has fewer dimensions than that" if isinstance(error, IndexError) else error
        raise TreeMismatchError(
            f"{spec.path}: the snapshot has {spec}, which cannot be sharded as asked ({sharding}): {why}. Choose a "
            "sharding whose mesh axes divide the dimensions, or none for that dimension."
        ) from error
    return [(device, box_of(index or (), spec.shape) + tail) for device, index in indices.items()]


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
