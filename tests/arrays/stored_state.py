"""A state stored in plain memory, and read back from there: as workers, stores and readers do it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.arrays.plan import Plan, Planner, Topology, capture
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.recovery import Want, plan_reads
from ray_jax_ckpt.model.shards import Generation, box_of, extent, whole, within

ALONE = Topology(0, ("here",), 1)


@dataclasses.dataclass
class Stored:
    """Encoded indices in rank order, and the buffer of each rank, named by its number."""

    indices: list[bytes]
    buffers: list[np.ndarray]

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """Views of the buffers where a box lies there in one piece, as a reader of mapped memory gives them."""
        places, holders = {}, {}
        for rank, raw in enumerate(self.indices):
            for part in Index.from_bytes(raw).layout.parts:
                holders.setdefault(part.id, []).append(str(rank))
                places[part.id, str(rank)] = part.offset
        results = [None] * len(wants)
        for read in plan_reads(wants, holders, ["0"]):
            start = places[read.stored.part, read.holder] + read.offset
            block = self.buffers[int(read.holder)][start : start + read.num_bytes]
            block = block.view(dtypes[read.want]).reshape(extent(read.span))
            box = wants[read.want].box
            if read.span == box:
                block.flags.writeable = False
                results[read.want] = block
                continue
            if results[read.want] is None:
                results[read.want] = np.empty(extent(box), dtypes[read.want])
            results[read.want][within(read.shared, box)] = block[within(read.shared, read.span)]
        return results

    def restore(
        self, template: Any, shardings: Any = None, *, rank: int = 0, world_size: int | None = None, **options: bool
    ) -> Any:
        """What a rank gets."""
        indices = [Index.from_bytes(raw) for raw in self.indices]
        assembler = Assembler(indices, rank, world_size or len(indices))
        return assembler.restore(template, shardings, Options(**options), self.fetch)

    def scribble(self) -> None:
        """The buffers are reused for something else."""
        for buffer in self.buffers:
            buffer[:] = 0xA5


def aligned(num_bytes: int) -> np.ndarray:
    """A buffer that XLA could use in place, as a segment's memory is."""
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


def digested(target: np.ndarray, source: np.ndarray) -> str:
    return copy_and_digest(target, source, True)


def stored(plan: Plan, captured: Any, step: int = 7) -> Stored:
    """Stores what was captured."""
    buffer = aligned(plan.layout.num_bytes)
    digests = captured.write(buffer, digested)
    index = Index(Generation(1, 0, step), plan.layout, digests, captured.values)
    return Stored([index.to_bytes()], [buffer])


def save(state: Any) -> Stored:
    """Plans, captures and stores a state; it is as dead as it can be when this returns."""
    flat = tree.flatten(state)
    plan = Planner(ALONE).plan(flat)
    captured = capture(plan, flat)
    destroy(flat.leaves)
    return stored(plan, captured)


def destroy(leaves: Sequence[Any]) -> None:
    """Deletes arrays and overwrites numpy arrays in place, as a training loop might at once."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.delete()
        elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            leaf.reshape(-1).view(np.uint8)[:] = 0x5A


def split(states: Sequence[Any], local: Sequence[str] = ()) -> Stored:
    """One snapshot of several ranks: of global arrays each rank has the rows of its share, the rest is its own.

    Args:
        states: Every rank's view of the whole state.
        local: Paths of arrays that are not global.
    """
    world_size, indices, buffers = len(states), [], []
    for rank, state in enumerate(states):
        flat = tree.flatten(state)
        specs = [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
        is_local = {i for i, s in enumerate(specs) if s.kind in ("value", "numpy") or s.path in local}
        data = {i: _data(leaf) for i, leaf in enumerate(flat.leaves) if specs[i].kind != "value"}
        shared = [(i, _share(x, rank, world_size)) for i, x in data.items() if i not in is_local]
        own = [(i, whole(data[i].shape)) for i in data if i in is_local]
        contents = [(f"s{rank}>", (), True, shared), (f"h{rank}", (), True, own)]
        sized = [(*part, [(i, box, _num_bytes(data[i], box)) for i, box in boxes]) for *part, boxes in contents]
        layout = Layout(
            rank, world_size, "same", tuple(s.to_json() for s in specs), frozenset(is_local), lay_out(sized)
        )
        buffer, digests = aligned(layout.num_bytes), {}
        for part in layout.parts:
            digests[part.id] = []
            for item in part.items:
                piece = data[item.leaf][tuple(slice(*side) for side in item.box)]
                start = part.offset + item.offset
                source = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                digests[part.id].append(digested(buffer[start : start + item.num_bytes], source))
        values = {i: tree.encode_value(leaf) for i, leaf in enumerate(flat.leaves) if specs[i].kind == "value"}
        indices.append(Index(Generation(1, 0, 7), layout, digests, values).to_bytes())
        buffers.append(buffer)
    return Stored(indices, buffers)


def _data(leaf: Any) -> np.ndarray:
    return np.asarray(tree.key_data(leaf) if tree.is_key(leaf) else leaf)


def _share(x: np.ndarray, rank: int, world_size: int) -> Any:
    rows = -(-x.shape[0] // world_size)
    return box_of((slice(rank * rows, (rank + 1) * rows), *[slice(None)] * (x.ndim - 1)), x.shape)


def _num_bytes(x: np.ndarray, box: Any) -> int:
    return math.prod(extent(box)) * x.dtype.itemsize


def assert_same(found: Any, wanted: Any) -> None:
    """Two trees are the same: structure, types, bits, and where and how their arrays lie."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    flat = tree.flatten(wanted)
    for path, a, b in zip(flat.paths, jax.tree.leaves(found), flat.leaves, strict=True):
        assert type(a) is type(b), path
        if isinstance(b, jax.Array):
            assert a.dtype == b.dtype, path
            assert a.shape == b.shape, path
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), path
            assert a.sharding == b.sharding, path
            assert a.sharding.memory_kind == b.sharding.memory_kind, path
            assert a.committed == b.committed, path
            if tree.is_key(b):
                assert jax.random.key_impl(a) == jax.random.key_impl(b), path
        assert bits(a) == bits(b), path


def bits(leaf: Any) -> Any:
    """Everything about a leaf's content that can be compared with ==."""
    if isinstance(leaf, jax.Array | np.ndarray):
        data = _data(leaf)
        return str(data.dtype), data.shape, data.tobytes()
    return type(leaf), tree.encode_value(leaf)
