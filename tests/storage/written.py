"""States written to storage as workers and stores do it: planned, captured, and streamed from memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.fs

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.plan import Topology, capture, make_plan
from ray_jax_ckpt.digest import copy_and_digest, digest
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.shards import Box, Generation, volume, whole
from ray_jax_ckpt.storage.manifest import FileRecord, Manifest
from ray_jax_ckpt.storage.ocdbt import merge_databases, write_database
from ray_jax_ckpt.storage.orbax_metadata import orbax_files
from ray_jax_ckpt.storage.plan import About, DirectoryPlan, plan_files
from ray_jax_ckpt.storage.writer import Effort, Target, write_files

ALONE = Topology(0, ("here",), 1)


@dataclasses.dataclass
class Held:
    """A generation in memory: every rank's index, the parts by id, and Orbax's files."""

    indices: list[Index]
    parts: dict[str, np.ndarray]
    orbax: Mapping[str, bytes]

    def read(self, part: str, offset: int, num_bytes: int) -> np.ndarray:
        return self.parts[part][offset : offset + num_bytes]

    def plan(self, **about: Any) -> DirectoryPlan:
        return plan_files(self.indices, self.orbax, About(**{"step": 7, "created_at_s": time.time(), **about}))


def hold(state: Any, *, verify: bool = True, ocdbt: bool = False, **changes: Any) -> Held:
    """Captures a state of one process."""
    flat = tree.flatten(state)
    plan = make_plan(flat, ALONE)
    captured = capture(plan, flat)
    buffer = np.empty(plan.layout.num_bytes, np.uint8)
    digests = captured.write(buffer, lambda target, source: copy_and_digest(target, source, verify))
    index = Index(Generation(1, 0, 7), plan.layout, digests, captured.values, **changes)
    parts = {part.id: buffer[part.offset : part.offset + part.num_bytes] for part in plan.layout.parts}
    return Held([index], parts, orbax_files(flat, captured.values, ocdbt=ocdbt))


def write(
    held: Held, path: Any, filesystem: pyarrow.fs.FileSystem | None = None, effort: Effort | None = None, **about: Any
) -> Manifest:
    """Writes a generation, each rank's share after the other."""
    filesystem, effort = filesystem or pyarrow.fs.LocalFileSystem(), effort or Effort(timeout_s=60)
    plan = held.plan(**about)
    target = Target(filesystem, str(path))
    target.prepare()
    records: dict[str, FileRecord] = {}
    for rank in range(len(held.indices)):
        records |= write_files(target, plan.files_of(rank), held.read, effort)
        if plan.database_writers:
            records |= write_database(target, plan, held.read, effort, writer=rank)
    records |= merge_databases(target, plan, effort)
    manifest = plan.manifest(records)
    target.commit(manifest, effort)
    return manifest


def paths(plan: DirectoryPlan) -> Sequence[str]:
    return sorted(file.path for file in plan.files)


def hold_group(
    states: Sequence[Any],
    *,
    data: Sequence[Any] = (),
    blobs: Sequence[bytes] = (),
    verify: bool = True,
    ocdbt: bool = False,
) -> Held:
    """A generation of several ranks: of jax.Arrays each has its rows, of a state that is the same; the rest is its own.

    Args:
        states: Every rank's view of the whole.
        data: Encoded, per rank.
        blobs: One per rank, which its `data` refers to.
        verify: Whether there are digests.
        ocdbt: Whether arrays go into a database.
    """
    world_size, indices, parts = len(states), [], {}
    for rank, state in enumerate(states):
        flat = tree.flatten(state)
        specs = [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
        arrays = {i: np.asarray(leaf) for i, leaf in enumerate(flat.leaves) if specs[i].kind in ("array", "numpy")}
        mine = {i: _rows(x.shape, rank, world_size) for i, x in arrays.items() if specs[i].kind == "array"}
        own = {i: whole(x.shape) for i, x in arrays.items() if specs[i].kind == "numpy"}
        contents = []
        for name, boxes in ((f"s{rank}", mine), (f"h{rank}", own)):
            sized = [(i, box, arrays[i].itemsize * volume(box)) for i, box in boxes.items()]
            contents.append((name, (), True, sized))
        values = {i: tree.encode_value(leaf) for i, leaf in enumerate(flat.leaves) if specs[i].kind == "value"}
        local = frozenset(own) | frozenset(values)
        layout = Layout(rank, world_size, "same", tuple(s.to_json() for s in specs), local, lay_out(contents))
        digests: dict[str, list[str]] = {}
        for part in layout.parts:
            blob = blobs[rank] if blobs and part.id == f"h{rank}" else b""
            parts[part.id] = np.zeros(part.num_bytes + len(blob), np.uint8)
            parts[part.id][part.num_bytes :] = np.frombuffer(blob, np.uint8)
            digests[part.id] = []
            for item in part.items:
                piece = arrays[item.leaf][tuple(slice(*side) for side in item.box)]
                raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                target = parts[part.id][item.offset : item.offset + item.num_bytes]
                digests[part.id].append(copy_and_digest(target, raw, verify))
        kept = [(layout.host_part.num_bytes, len(blobs[rank]), digest(blobs[rank]))] if blobs else []
        given = data[rank] if data else None
        indices.append(Index(Generation(2, 1, 7), layout, digests, values, given, {"loss": rank / 2}, kept))
    flat = tree.flatten(states[0])
    encoded = {i: tree.encode_value(x) for i, x in enumerate(flat.leaves) if not hasattr(x, "shape")}
    return Held(indices, parts, orbax_files(flat, encoded, ocdbt=ocdbt))


def _rows(shape: Sequence[int], rank: int, world_size: int) -> Box:
    rows = -(-shape[0] // world_size)
    return (min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])), *whole(shape[1:])
