"""A state of one process, captured and written as a checkpoint, without stores."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.plan import Captured, Plan, Planner, Topology, capture
from ray_jax_ckpt.errors import NotSupportedError, PersistError, PersistExistsError
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.files import remove_tree, renames
from ray_jax_ckpt.storage.filesystem import Place
from ray_jax_ckpt.storage.manifest import MANIFEST, Manifest
from ray_jax_ckpt.storage.ocdbt import write_database
from ray_jax_ckpt.storage.orbax_metadata import orbax_files
from ray_jax_ckpt.storage.orbax_types import OrbaxType, orbax_types
from ray_jax_ckpt.storage.plan import About, needs_database, plan_files
from ray_jax_ckpt.storage.spares import put_back, spare, standing
from ray_jax_ckpt.storage.writer import Effort, Target, write_files

_ALONE = Topology(0, ("here",), 1)


@dataclass(frozen=True)
class Kept:
    """A state at the time of a call, to be written later, from any thread.

    Attributes:
        index: Where its bytes would be in a buffer; there is none.
        orbax: Orbax's metadata files.
        captured: Copies of the arrays.
    """

    index: Index
    orbax: Mapping[str, bytes] = field(repr=False)
    captured: Captured = field(repr=False)

    def write(self, target: Target, about: About, effort: Effort) -> Manifest:
        """Writes it as a checkpoint. Blocks.

        Raises:
            PersistError: Storage did not take it.
            UnsupportedLeafError: The tree cannot be written.
        """
        plan = plan_files([self.index], self.orbax, about)
        read = _CapturedBytes(self.captured).read
        records = write_files(target, plan.files_of(0), read, effort)
        if plan.database_writers:
            records |= write_database(target, plan, read, effort)
        manifest = plan.manifest(records)
        target.commit(manifest, effort)
        return manifest


def save_as(kept: Kept, place: Place, about: About, *, overwrite: bool, effort: Effort) -> None:
    """Writes a state as the checkpoint at a place. Blocks.

    Whoever kills it at any moment leaves what was there before, or the new one, for `open_checkpoint`.

    Raises:
        PersistExistsError: There is one already, and it is not to be overwritten.
        PersistError: Storage did not take it.
        UnsupportedLeafError: The tree cannot be written.
    """
    filesystem, path = place
    with _looking(path):
        put_back(filesystem, path)
        there = standing(filesystem, path)
    if there is not None and not overwrite:
        raise PersistExistsError(f"{path} is there already. Choose another directory or step, or overwrite it.")
    if there == path and not renames(filesystem):
        # What is there is removed file by file, and so must not be all that there is.
        _write(kept, Target(filesystem, spare(path)), about, effort)
    _write(kept, Target(filesystem, path), about, effort)
    with _looking(path):
        remove_tree(filesystem, spare(path), first=MANIFEST)


def _write(kept: Kept, target: Target, about: About, effort: Effort) -> None:
    target.prepare(overwrite=True)
    try:
        kept.write(target, about, effort)
    except BaseException:
        target.discard()
        raise


@contextlib.contextmanager
def _looking(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise PersistError(f"{path} cannot be written: {error}") from error


class Keeper:
    """Captures states of one process. What depends only on the tree's structure is made once."""

    def __init__(self) -> None:
        self._planner = Planner(_ALONE)
        self._known: _Described | None = None

    def keep(self, state: Any, *, step: int | None, data: Any = None) -> Kept:
        """Captures a state. When it returns, the caller may do with the state what it likes.

        Args:
            state: Any pytree.
            step: Of the training.
            data: What is kept beside it, as `ray_jax_ckpt.values.encode_value` encodes it.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved.
            NotSupportedError: An array is spread over several processes.
        """
        flat = tree.flatten(state)
        # Of one process every array is; to ask thousands takes as long as to copy them.
        for path, leaf in zip(flat.paths, flat.leaves, strict=True) if jax.process_count() > 1 else ():
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                raise NotSupportedError(
                    f"leaf {path} is spread over several processes, and this saves what one process has. In a training "
                    "run take ray_jax_ckpt.snapshot and report it."
                )
        plan = self._planner.plan(flat)
        values = {leaf: tree.encode_value(flat.leaves[leaf]) for leaf in plan.values}
        # Digests are made while the bytes are written.
        digests = {part.id: [""] * len(part.items) for part in plan.layout.parts}
        index = Index(Generation(0, 0, step or 0), plan.layout, digests, values, data)
        files = self._orbax(flat, plan, index)
        # At the end: the copies take the cores from all that follows.
        return Kept(index, files, capture(plan, flat))

    def _orbax(self, flat: tree.Flat, plan: Plan, index: Index) -> Mapping[str, bytes]:
        known, types = self._known, _types_of_values(plan, index.values)
        if known is not None and known.plan is plan and known.types == types:
            return known.files
        made = orbax_files(flat, index.values, ocdbt=needs_database([index]))
        self._known = _Described(plan, types, made)
        return made


@dataclass(frozen=True)
class _Described:
    """What Orbax is told of the states of a plan."""

    plan: Plan
    types: Sequence[OrbaxType]
    files: Mapping[str, bytes]


def _types_of_values(plan: Plan, values: Mapping[int, Any]) -> list[OrbaxType]:
    """What Orbax takes plain values for. All else that is to be said of a state follows from its plan."""
    specs = [LeafSpec.from_json(dict(plan.layout.leaves[leaf])) for leaf in values]
    return orbax_types(specs, dict(enumerate(values.values())))


class _CapturedBytes:
    """The bytes of captured arrays by their places in a buffer that was never made. Any thread may read."""

    def __init__(self, captured: Captured) -> None:
        self._captured, self._contents, self._lock = captured, {}, threading.Lock()
        offsets = {part.id: part.offset for part in captured.plan.layout.parts}
        self._places = {
            (item.part, item.offset - offsets[item.part]): place
            for item, place in zip(captured.plan.captures, captured.places, strict=True)
        }

    def read(self, part: str, offset: int, num_bytes: int) -> np.ndarray:
        """As `writer.Read`. Waits for the copy off the device."""
        number, start = self._places[part, offset]
        with self._lock:
            if number not in self._contents:
                array = np.ascontiguousarray(np.asarray(self._captured.arrays[number]))
                self._contents[number] = array.reshape(-1).view(np.uint8)
        return self._contents[number][start : start + num_bytes]


def about(step: int | None, custom: Mapping[str, Any] | None = None) -> About:
    """What a checkpoint that is written now, outside of a run, says of itself."""
    return About(step=step, created_at_s=time.time(), custom=custom or {})
