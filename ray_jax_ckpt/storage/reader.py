"""Opens a checkpoint that this package wrote."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow.fs as pafs

from ray_jax_ckpt.batch import BatchMemory
from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.model.index import Index, Layout, PartLayout, lay_out
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.recovery import NotHeldError, Stored, Want
from ray_jax_ckpt.model.shards import Box, covers, extent, volume, whole
from ray_jax_ckpt.storage.filesystem import describe, join, reading
from ray_jax_ckpt.storage.grid import chunks_of
from ray_jax_ckpt.storage.loopback import VerifiedFiles
from ray_jax_ckpt.storage.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileRecord,
    LeafRecord,
    Manifest,
    RankItem,
    RankRecord,
    parse_manifest,
    parse_rank,
    rank_blob,
    rank_file,
)
from ray_jax_ckpt.storage.segments import Segment, Share, check, read, read_bytes
from ray_jax_ckpt.storage.streams import Deadline, Job, run
from ray_jax_ckpt.storage.tensors import Tensors

ARRAYS = "arrays"
"""Part of the leaves that all ranks shared."""


def read_manifest(filesystem: pafs.FileSystem, path: str) -> Manifest:
    """The manifest of a checkpoint's directory.

    Raises:
        NoCheckpointError: There is none: no checkpoint of this package, or one that was not finished.
        IntegrityError: It is damaged.
        StorageError: It cannot be read.
    """
    where = join(path, MANIFEST)
    with reading(f"Reading {describe(filesystem, where)}"):
        size = filesystem.get_file_info(where).size
        if size is not None and size > MAX_MANIFEST_BYTES:
            raise IntegrityError(f"{where} has {size} bytes, and {MAX_MANIFEST_BYTES} are read at most.")
        with filesystem.open_input_stream(where) as file:
            return parse_manifest(file.read(MAX_MANIFEST_BYTES + 1), describe(filesystem, where))


def lacking(filesystem: pafs.FileSystem, path: str, manifest: Manifest) -> list[str]:
    """What the directory lacks of its checkpoint, by a listing: a line for each file that is not there in its size.

    Digests are compared when bytes are read, or by `verify`.
    """
    with reading(f"Listing {describe(filesystem, path)}"):
        listed = filesystem.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True))
    prefix = len(path.rstrip("/")) + 1
    sizes = {info.path[prefix:]: info.size for info in listed if info.type == pafs.FileType.File}
    return [
        f"{name} ({'missing' if name not in sizes else f'{sizes[name]} bytes instead of {record.size}'})"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.size
    ]


def verify(filesystem: pafs.FileSystem, path: str, *, streams: int = 4, timeout_s: float = 3600.0) -> Manifest:
    """Reads all of a checkpoint and compares it with its digests.

    Raises:
        NoCheckpointError, IntegrityError, StorageError, RestoreTimeoutError: It is not whole, or cannot be read.
    """
    manifest, deadline = read_manifest(filesystem, path), Deadline.after(timeout_s)
    segments = [Segment.of_file(join(path, name), record) for name, record in manifest.files.items()]
    jobs = [Job(f"Reading {one.path}", partial(check, filesystem, one, deadline)) for one in segments]
    run(jobs, streams=streams, deadline=deadline)
    return manifest


class Reader:
    """An open checkpoint of this package. A context manager; not thread-safe.

    Args:
        filesystem: Where it is.
        path: Of its directory.
        streams: Files that are read at the same time.
        timeout_s: Bound of opening it, and of each `fetch`.
        listed: Whether the directory is listed first, which finds what is missing before anything is read.

    Raises:
        NoCheckpointError, IntegrityError, StorageError, RestoreTimeoutError: It cannot be opened.
    """

    def __init__(
        self, filesystem: pafs.FileSystem, path: str, *, streams: int, timeout_s: float, listed: bool = True
    ) -> None:
        self._filesystem, self._path, self._streams, self._timeout_s = filesystem, path, streams, timeout_s
        self.manifest = read_manifest(filesystem, path)
        if listed and (found := lacking(filesystem, path, self.manifest)):
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise IntegrityError(
                f"{describe(filesystem, path)} is not complete: {', '.join(found[:5])}{more}. Restore another one."
            )
        self.step, self.metrics = self.manifest.step, self.manifest.metrics
        self._segments: dict[tuple[str, int], Segment] = {}
        self._tensors: Tensors | None = None
        self._opening = threading.Lock()
        self._memory = BatchMemory()
        self._indices = self._make_indices(self._read_ranks())

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tensors is not None:
            self._tensors.close()

    def indices(self, template: Any = None) -> Sequence[Index]:
        """See `Source`."""
        return self._indices

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """See `Source`.

        Raises:
            NotHeldError: Nothing stored holds all of a box.
            IntegrityError, NoCheckpointError, StorageError, RestoreTimeoutError: Its bytes cannot be had.
        """
        deadline = Deadline.after(self._timeout_s)
        self._memory.reset()
        results, jobs = [], []
        shares: dict[Segment, list[Share]] = defaultdict(list)
        for number, (want, dtype) in enumerate(zip(wants, dtypes, strict=True)):
            memory = self._memory.take(volume(want.box) * dtype.itemsize)
            results.append(memory.view(dtype).reshape(extent(want.box)))
            found = want.found()
            if not covers((stored.item.box for stored, _ in found), want.box):
                raise NotHeldError(number)
            for stored, shared in found:
                share = Share(results[-1], want.box, stored.item.box, shared)
                segment = self._segment(stored)
                if segment is None:
                    name = self.manifest.leaves[stored.item.leaf].name
                    jobs.append(Job(f"Reading {name}", partial(self._read_tensor, name, share, deadline)))
                elif volume(shared):
                    shares[segment].append(share)
        jobs += [
            Job(f"Reading {segment.path}", partial(read, self._filesystem, segment, takers, deadline))
            for segment, takers in shares.items()
        ]
        run(jobs, streams=self._streams, deadline=deadline)
        return results

    def _segment(self, stored: Stored) -> Segment | None:
        """Where a stored item is; None: in the database. Large contents of `data` are no items of the index."""
        if stored.item.leaf < 0:
            rank = next(r for r in range(self.manifest.world_size) if host_part_id(r) == stored.part)
            path = join(self._path, rank_blob(rank))
            return Segment.of_range(path, stored.item.offset, stored.item.num_bytes, stored.digest)
        return self._segments.get((stored.part, stored.item.offset))

    def _read_tensor(self, name: str, share: Share, deadline: Deadline) -> None:
        with self._opening:
            if self._tensors is None:
                files = VerifiedFiles(self._filesystem, self._path, self.manifest.files, self._timeout_s)
                self._tensors = Tensors(
                    self._filesystem, self._path, files, is_database=True, driver="zarr3", streams=self._streams
                )
        self._tensors.read(name, share, deadline)

    # What is in it.

    def _read_ranks(self) -> list[RankRecord]:
        deadline, found = Deadline.after(self._timeout_s), {}

        def take(rank: int) -> None:
            name = rank_file(rank)
            segment = Segment.of_file(join(self._path, name), self.manifest.files[name])
            if segment.size > MAX_MANIFEST_BYTES:
                raise IntegrityError(
                    f"{segment.path} has {segment.size} bytes, and {MAX_MANIFEST_BYTES} are read at most."
                )
            record = parse_rank(bytes(read_bytes(self._filesystem, segment, deadline)), segment.path)
            found[rank] = _checked(record, rank, self.manifest, segment.path)

        ranks = range(self.manifest.world_size)
        run([Job(f"Reading {rank_file(r)}", partial(take, r)) for r in ranks], streams=self._streams, deadline=deadline)
        return [found[rank] for rank in ranks]

    def _make_indices(self, ranks: Sequence[RankRecord]) -> list[Index]:
        leaves, files = self.manifest.leaves, self.manifest.files
        local = frozenset(n for n, leaf in enumerate(leaves) if leaf.local or leaf.form == "value")
        arrays = [n for n, leaf in enumerate(leaves) if leaf.form != "value"]
        stored = {n: _items(n, leaves[n], self._path, files) for n in arrays}
        shared = self._place(ARRAYS, [item for n in arrays if n not in local for item in stored[n]])
        specs, indices = [leaf.spec for leaf in leaves], []
        for record in ranks:
            own: dict[int, list[_Placed]] = defaultdict(list)
            path = join(self._path, rank_blob(record.rank))
            for item in record.items:
                segment = Segment.of_range(path, item.offset, item.size, item.digest)
                own[item.leaf].append((item.leaf, item.region, segment))
            mine = [one for n in arrays if n in local for one in own.get(n) or stored[n]]
            host = self._place(host_part_id(record.rank), mine)
            layout = Layout(
                rank=record.rank,
                world_size=self.manifest.world_size,
                structure=self.manifest.structure,
                leaves=[record.specs.get(n, spec) for n, spec in enumerate(specs)] if record.specs else specs,
                local=local,
                parts=(shared[0], host[0]),
                skeleton=self.manifest.skeleton,
            )
            digests = {ARRAYS: shared[1], host_part_id(record.rank): host[1]}
            blobs = tuple((blob.offset, blob.size, blob.digest) for blob in record.blobs)
            values, metrics = {**self.manifest.values, **record.values}, self.metrics.get(record.rank, {})
            indices.append(Index(self.manifest.generation, layout, digests, values, record.data, metrics, blobs))
        return indices

    def _place(self, part: str, items: Sequence[_Placed]) -> tuple[PartLayout, list[str]]:
        """A part of items, and their digests; remembers where each is."""
        sizes = [(leaf, box, segment.size if segment else 1) for leaf, box, segment in items]
        (placed,) = lay_out([(part, (), False, sizes)])
        for item, (_, _, segment) in zip(placed.items, items, strict=True):
            if segment is not None:
                self._segments[part, item.offset] = segment
        # Only compared with one another: one digest per block says the same as one of all.
        return placed, ["".join(segment.blocks) if segment else "" for _, _, segment in items]


_Placed = tuple[int, Box, Segment | None]
"""Leaf, box, and where it is; None: in the database."""


def _items(number: int, leaf: LeafRecord, path: str, files: Mapping[str, FileRecord]) -> list[_Placed]:
    """The stored boxes of a leaf, as the manifest has them."""
    box = whole(leaf.shape)
    if leaf.form == "ocdbt":
        return [(number, box, None)]
    if not volume(box):
        return [(number, box, Segment("", 0, 0, ("",), 1))]
    names = ((leaf.path(key), chunk) for key, chunk in chunks_of(box, leaf.chunks or ()))
    return [(number, chunk, Segment.of_file(join(path, name), files[name])) for name, chunk in names]


def _checked(record: RankRecord, rank: int, manifest: Manifest, where: str) -> RankRecord:
    """What a rank's record says of places has to fit the manifest."""
    blob = manifest.files.get(rank_blob(rank))
    size, count = blob.size if blob else 0, len(manifest.leaves)
    ranges = [(one.offset, one.size) for one in (*record.items, *record.blobs)]
    problem = None
    if record.rank != rank:
        problem = f"it is that of rank {record.rank}"
    elif any(offset + length > size for offset, length in ranges):
        problem = f"it places bytes behind the {size} of {rank_blob(rank)}"
    elif any(n >= count or not manifest.leaves[n].local for n in (i.leaf for i in record.items)):
        problem = "it has items of leaves that are not a rank's own"
    elif any(n >= count for n in (*record.values, *record.specs)):
        problem = "it describes leaves that the tree does not have"
    else:
        specs = [leaf.spec for leaf in manifest.leaves] if rank == 0 else []
        described = (*enumerate(specs), *record.specs.items())
        found = (_spec_problem(spec, n, manifest.leaves[n]) for n, spec in described)
        own = (_item_problem(item, manifest.leaves[item.leaf]) for item in record.items)
        problem = next((text for text in itertools.chain(found, own) if text), None)
    if problem is not None:
        raise IntegrityError(f"{where} is damaged: {problem}.")
    return record


def _spec_problem(spec: Mapping[str, Any], number: int, leaf: LeafRecord) -> str | None:
    try:
        found = LeafSpec.from_json(spec)
        fits = (found.kind == "value") == (leaf.form == "value")
        fits &= found.kind == "value" or np.dtype(found.dtype) == np.dtype(leaf.dtype)
    except (ValueError, TypeError) as error:
        return f"leaf {number}: {error}"
    return None if fits else f"leaf {number} is described as {found}, and stored as {leaf.dtype}{list(leaf.shape)}"


def _item_problem(item: RankItem, leaf: LeafRecord) -> str | None:
    if any(a > b for a, b in item.box) or volume(item.region) * leaf.itemsize != item.size:
        return f"leaf {item.leaf} has {item.size} bytes for the box {item.box} of {leaf.dtype}"
    return None
