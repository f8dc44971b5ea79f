"""Replicas as the Pathways runtime keeps them: one array per replica, split and joined by the runtime itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ray_jax_ckpt.arrays import capture, tree
from ray_jax_ckpt.arrays.replicas import Origin, Restoring, Target, has_axis, lost

Split = Callable[[Sequence[jax.Array], str], Sequence[Sequence[jax.Array]]]
Concatenate = Callable[[Sequence[Sequence[jax.Array]], str], Sequence[jax.Array]]


def functions() -> tuple[Split, Concatenate] | None:
    """Returns the runtime's split and concatenate where arrays live behind a Pathways proxy, else None."""
    config: Any = jax.config
    if "proxy" not in (config.jax_platforms or ""):
        return None
    try:
        from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis
        from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis
    except ImportError:
        return None
    return split_by_mesh_axis, concatenate_by_mesh_axis


def can_split(named: Sequence[tuple[str, jax.Array]], *, replica_axis_index: int) -> bool:
    """Whether the runtime's split may be used: on arrays that span processes it crashes the process."""
    arrays = [x for _, x in named]
    return all(
        x.is_fully_addressable and isinstance(x.sharding, NamedSharding) and has_axis(x.sharding, replica_axis_index)
        for x in arrays
    )


def capture_replicas(
    named: Sequence[tuple[str, jax.Array]], split: Split, concatenate: Concatenate, *, replica_axis_index: int
) -> list[SplitLeaf]:
    """Like `capture_shards`, with the runtime's own split; the copies stay where each replica is.

    All leaves must pass `can_split`.
    """
    pinned = [tree.plain(x) for x in capture.pin([x for _, x in named])]
    by_mesh: dict[Any, list[int]] = {}
    for i, x in enumerate(pinned):
        by_mesh.setdefault(_mesh(x), []).append(i)
    leaves: list[Any] = [None] * len(named)
    for mesh, numbers in by_mesh.items():
        axis = mesh.axis_names[replica_axis_index]
        parts = split([pinned[i] for i in numbers], axis)
        for position, i in enumerate(numbers):
            replicas = [replica[position] for replica in parts]
            leaves[i] = SplitLeaf(Origin.of(*named[i]), pinned[i].shape, replicas, axis, concatenate)
    return leaves


def _mesh(x: jax.Array) -> Any:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.mesh


class SplitLeaf:
    """An array leaf as one array per replica."""

    def __init__(
        self,
        origin: Origin,
        data_shape: tuple[int, ...],
        replicas: list[jax.Array],
        axis: str,
        concatenate: Concatenate,
    ) -> None:
        self.origin = origin
        self.data_shape = data_shape
        self.replicas = replicas
        self._axis = axis
        self._concatenate = concatenate

    @property
    def buffers(self) -> list[jax.Array]:
        """The replicas."""
        return list(self.replicas)

    def restore(self, target: Target) -> Restoring:
        """Defers all work to `wait`: leaf by leaf, no more than one leaf is in memory twice."""
        return _FromReplicas(self, target)

    def join(self) -> jax.Array:
        """Returns the leaf's data on the devices of the replicas that still answer."""
        copies, lost_replicas, cause = [], [], None
        for number, replica in enumerate(self.replicas):
            try:
                # A copy, since concatenating donates; making it shows whether the replica still answers.
                copies.append(jax.block_until_ready(jax.device_put(replica, replica.sharding, may_alias=False)))
            except RuntimeError as error:
                lost_replicas.append(number)
                cause = error
        is_cut = self.replicas[0].shape != self.data_shape
        if not copies or (is_cut and lost_replicas):
            what = "it is sharded along the replica axis" if is_cut else "no replica is left"
            raise lost(self.origin.path, f"{what}, and replicas {lost_replicas} do not answer", cause)
        return self._concatenate([[copy] for copy in copies], self._axis)[0]


class _FromReplicas:
    """A leaf on its way from the replicas that answer."""

    def __init__(self, leaf: SplitLeaf, target: Target) -> None:
        self._leaf = leaf
        self._target = target

    def requests(self) -> list[tuple[jax.Array | np.ndarray, Sharding]]:
        return []

    def accept(self, copies: Sequence[jax.Array]) -> None:
        assert not copies

    def wait(self) -> Any:
        joined = self._leaf.join()
        if self._target.as_numpy:
            return np.array(joined)
        origin = self._leaf.origin
        if self._target.sharding is None:
            return origin.finish(jnp.array(np.asarray(joined)))
        result = origin.finish(joined)
        # Between meshes first, from host to device then: the runtime does one of them at a time.
        for sharding in (self._target.sharding.with_memory_kind(capture.HOST_MEMORY_KINDS[0]), self._target.sharding):
            result = jax.device_put(result, sharding, may_alias=False)
        return jax.block_until_ready(result)
