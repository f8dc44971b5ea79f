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
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import FileRecord, Manifest
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
        records |= write_files(target, plan.of(rank), held.read, effort)
    manifest = plan.manifest(records)
    target.commit(manifest, effort)
    return manifest


def paths(plan: DirectoryPlan) -> Sequence[str]:
    return sorted(file.path for file in plan.files)
