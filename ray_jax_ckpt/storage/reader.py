"""Opens a checkpoint that this package wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow.fs as pafs

from ray_jax_ckpt.errors import CheckpointError, IntegrityError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.model.index import Index, Layout, PartLayout, lay_out
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.recovery import NotHeldError, Stored, Want
from ray_jax_ckpt.model.shards import Box, covers, volume, whole
from ray_jax_ckpt.storage.filesystem import describe, join
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
from ray_jax_ckpt.storage.segments import Segment, Share, check, read, read_bytes, read_small
from ray_jax_ckpt.storage.source import Landings, RankIndices
from ray_jax_ckpt.storage.streams import Deadline, Job, ask, run
from ray_jax_ckpt.storage.tensors import Tensors

MARKER = "commit_success.txt"
"""Orbax's mark of what is finished. It says nothing that the manifest does not, and tools that copy leave it out."""
ARRAYS = "arrays"
"""Part of the leaves that all ranks shared."""


def read_manifest(filesystem: pafs.FileSystem, path: str, deadline: Deadline | None = None) -> Manifest:
    """The manifest of a checkpoint's directory.

    Args:
        filesystem: Where it is.
        path: Of the directory.
        deadline: When to give up; None: two minutes from now.

    Raises:
        NoCheckpointError: There is none: no checkpoint of this package, or one that was not finished.
        IntegrityError: It is damaged.
        StorageError, RestoreTimeoutError: It cannot be read.
    """
    where = join(path, MANIFEST)
    return parse_manifest(read_small(filesystem, where, deadline), describe(filesystem, where))


def lacking(filesystem: pafs.FileSystem, path: str, manifest: Manifest, deadline: Deadline | None = None) -> list[str]:
    """What the directory lacks of its checkpoint, by a listing: a line for each file that is not there in its size.

    Digests are compared when bytes are read, or by `verify`.
    """
    selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
    what = f"Listing {describe(filesystem, path)}"
    listed = ask(lambda: filesystem.get_file_info(selector), what, deadline)
    # Some filesystems begin what they list with a slash, whatever they are asked for.
    prefix = path.strip("/") + "/"
    sizes = {
        info.path.lstrip("/").removeprefix(prefix): info.size for info in listed if info.type == pafs.FileType.File
    }
    return [
        f"{name} ({'missing' if name not in sizes else f'{sizes[name]} bytes instead of {record.size}'})"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.size and (name in sizes or name != MARKER)
    ]


def inspect(filesystem: pafs.FileSystem, path: str) -> tuple[str, Manifest | None]:
    """Why a checkpoint cannot be restored, as far as a listing tells, "" if nothing speaks against it; its manifest.

    Raises:
        StorageError, RestoreTimeoutError: It cannot be read. That says nothing of what is there.
    """
    try:
        manifest = read_manifest(filesystem, path)
        missing = lacking(filesystem, path, manifest)
    except (StorageError, RestoreTimeoutError):
        raise
    except CheckpointError as error:
        return str(error), None
    problem = f"{len(missing)} of its files are not as they were written: {some(missing)}"
    return problem if missing else "", manifest


def some(names: Iterable[str]) -> str:
    """The first of them, in words."""
    found = list(names)
    return ", ".join(found[:3]) + (" and more" if len(found) > 3 else "")


def verify(filesystem: pafs.FileSystem, path: str, *, streams: int = 4, timeout_s: float = 3600.0) -> Manifest:
    """Reads all of a checkpoint and compares it with its digests.

    Raises:
        NoCheckpointError, IntegrityError, StorageError, RestoreTimeoutError: It is not whole, or cannot be read.
    """
    manifest, deadline = read_manifest(filesystem, path), Deadline.after(timeout_s)
    copied = ask(lambda: filesystem.get_file_info(join(path, MARKER)), f"Looking at {path}", deadline)
    absent = {MARKER} if copied.type == pafs.FileType.NotFound else set()
    segments = [
        Segment.of_file(join(path, name), record) for name, record in manifest.files.items() if name not in absent
    ]
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
        available_bytes: Memory that there is; None: not known.
        listed: Whether the directory is listed first, which finds what is missing before anything is read.

    Raises:
        NoCheckpointError, IntegrityError, StorageError, RestoreTimeoutError: It cannot be opened.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        path: str,
        *,
        streams: int,
        timeout_s: float,
        available_bytes: int | None = None,
        listed: bool = True,
    ) -> None:
        self._filesystem, self._path, self._streams, self._timeout_s = filesystem, path, streams, timeout_s
        deadline = Deadline.after(timeout_s)
        self.manifest = read_manifest(filesystem, path, deadline)
        if listed and (found := lacking(filesystem, path, self.manifest, deadline)):
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise IntegrityError(
                f"{describe(filesystem, path)} is not complete: {', '.join(found[:5])}{more}. Restore another one."
            )
        self.step, self.metrics = self.manifest.step, self.manifest.metrics
        self._segments: dict[tuple[str, int], Segment] = {}
        self._tensors: Tensors | None = None
        self._memory = describe(filesystem, path), available_bytes
        self._landings = Landings(*self._memory)
        self._check_leaves()
        self._stored = self._stored_items()
        shared = [item for n, items in self._stored.items() if n not in self._local for item in items]
        self._shared = self._place(ARRAYS, shared)
        self._indices = RankIndices(self.manifest.world_size, self._make_indices)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tensors is not None:
            self._tensors.close()
            self._tensors = None
        # Every rank's `data` may be asked for later; the memory for arrays is not needed any more.
        self._landings = Landings(*self._memory)

    @property
    def sharded(self) -> frozenset[int]:
        """See `Source`."""
        return frozenset(n for n, stored in self._stored.items() if len(stored) > 1)

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
        shares: dict[Segment, list[Share]] = defaultdict(list)
        tensors: list[tuple[str, Share]] = []
        found = [want.found() for want in wants]
        for number, (want, sources) in enumerate(zip(wants, found, strict=True)):
            if not covers((stored.item.box for stored, _ in sources), want.box):
                raise NotHeldError(number)
        # Only now: what is not there takes no memory, whatever its shape is said to be.
        results = self._landings.take(wants, dtypes)
        for want, result, sources in zip(wants, results, found, strict=True):
            for stored, shared in sources:
                share = Share(result, want.box, stored.item.box, shared)
                segment = self._segment(stored)
                if segment is None:
                    tensors.append((self.manifest.leaves[stored.item.leaf].name, share))
                elif volume(shared):
                    shares[segment].append(share)
        jobs = [
            Job(f"Reading {segment.path}", partial(read, self._filesystem, segment, takers, deadline))
            for segment, takers in shares.items()
        ]
        if tensors:
            jobs += self._database().jobs(tensors, deadline)
        run(jobs, streams=self._streams, deadline=deadline)
        return results

    def _segment(self, stored: Stored) -> Segment | None:
        """Where a stored item is; None: in the database. Large contents of `data` are no items of the index."""
        if stored.item.leaf < 0:
            rank = next(r for r in range(self.manifest.world_size) if host_part_id(r) == stored.part)
            path = join(self._path, rank_blob(rank))
            return Segment.of_range(path, stored.item.offset, stored.item.num_bytes, stored.digest)
        return self._segments.get((stored.part, stored.item.offset))

    def _database(self) -> Tensors:
        if self._tensors is None:
            files = VerifiedFiles(self._filesystem, self._path, self.manifest.files, self._timeout_s)
            self._tensors = Tensors(
                self._filesystem, self._path, files, is_database=True, driver="zarr3", streams=self._streams
            )
        return self._tensors

    # What is in it.

    def _read_ranks(self, ranks: Sequence[int]) -> list[RankRecord]:
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

        run([Job(f"Reading {rank_file(r)}", partial(take, r)) for r in ranks], streams=self._streams, deadline=deadline)
        return [found[rank] for rank in ranks]

    def _check_leaves(self) -> None:
        """What is said of leaves, where no rank says anything else."""
        described = ((number, leaf, None, ()) for number, leaf in enumerate(self.manifest.leaves))
        problem = next((text for one in described if (text := _leaf_problem(*one))), None)
        if problem is not None:
            raise IntegrityError(f"{describe(self._filesystem, join(self._path, MANIFEST))} is damaged: {problem}.")

    @cached_property
    def _local(self) -> frozenset[int]:
        """Leaves of which each rank had one of its own."""
        return frozenset(n for n, one in enumerate(self.manifest.leaves) if one.local or one.form == "value")

    def _stored_items(self) -> dict[int, list[_Placed]]:
        leaves, files = self.manifest.leaves, self.manifest.files
        return {n: _items(n, leaf, self._path, files) for n, leaf in enumerate(leaves) if leaf.form != "value"}

    def _make_indices(self, ranks: Sequence[int]) -> dict[int, Index]:
        return {record.rank: self._make_index(record) for record in self._read_ranks(ranks)}

    def _make_index(self, record: RankRecord) -> Index:
        own: dict[int, list[_Placed]] = defaultdict(list)
        path = join(self._path, rank_blob(record.rank))
        for item in record.items:
            segment = Segment.of_range(path, item.offset, item.size, item.digest)
            own[item.leaf].append((item.leaf, item.region, segment))
        mine = [one for n, stored in self._stored.items() if n in self._local for one in own.get(n) or stored]
        host, specs = self._place(host_part_id(record.rank), mine), [leaf.spec for leaf in self.manifest.leaves]
        layout = Layout(
            rank=record.rank,
            world_size=self.manifest.world_size,
            structure=self.manifest.structure,
            leaves=[record.specs.get(n, spec) for n, spec in enumerate(specs)] if record.specs else specs,
            local=self._local,
            parts=(self._shared[0], host[0]),
            skeleton=self.manifest.skeleton,
        )
        digests = {ARRAYS: self._shared[1], host_part_id(record.rank): host[1]}
        blobs = tuple((blob.offset, blob.size, blob.digest) for blob in record.blobs)
        values, metrics = {**self.manifest.values, **record.values}, self.metrics.get(record.rank, {})
        return Index(self.manifest.generation, layout, digests, values, record.data, metrics, blobs)

    def _place(self, part: str, items: Sequence[_Placed]) -> tuple[PartLayout, list[str]]:
        """A part of items, and their digests; remembers where each is."""
        sizes = [(leaf, box, segment.size if segment else 1) for leaf, box, segment in items]
        (placed,) = lay_out([(part, (), False, sizes)])
        for item, (_, _, segment) in zip(placed.items, items, strict=True):
            if segment is not None:
                self._segments[part, item.offset] = segment
        # Only compared with one another: one digest per block says the same as one of all.
        # What has none, in the database or without bytes, is the same for all who do not have another.
        return placed, ["".join(segment.blocks) if segment else "stored" for _, _, segment in items]


_Placed = tuple[int, Box, Segment | None]
"""Leaf, box, and where it is; None: in the database."""


def _items(number: int, leaf: LeafRecord, path: str, files: Mapping[str, FileRecord]) -> list[_Placed]:
    """The stored boxes of a leaf, as the manifest has them."""
    box = whole(leaf.shape)
    if leaf.form == "ocdbt":
        return [(number, box, None)]
    if not volume(box):
        return [(number, box, Segment("", 0, 0, ("nothing",), 1))]
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
        own: dict[int, list[RankItem]] = defaultdict(list)
        for item in record.items:
            own[item.leaf].append(item)
        numbers = {*record.specs, *own}
        described = ((n, manifest.leaves[n], record.specs.get(n), own.get(n, ())) for n in numbers)
        problem = next((text for one in described if (text := _leaf_problem(*one))), None)
    if problem is not None:
        raise IntegrityError(f"{where} is damaged: {problem}.")
    return record


def _leaf_problem(
    number: int, leaf: LeafRecord, own: Mapping[str, Any] | None, items: Sequence[RankItem]
) -> str | None:
    """How a leaf's description (a rank's own, if it has one) and what is stored of it differ."""
    try:
        spec = LeafSpec.from_json(leaf.spec if own is None else own)
        dtype = None if spec.kind == "value" else np.dtype(spec.dtype)
    except (ValueError, TypeError) as error:
        return f"leaf {number}: {error}"
    if dtype is None or leaf.form == "value":
        return None if dtype is None and leaf.form == "value" else f"leaf {number} is a value and none"
    tail = len(leaf.shape) - len(leaf.spec["shape"])
    if items:
        fits = all(len(item.box) == len(spec.shape) + tail and _fits(item, dtype) for item in items)
    else:
        fits = leaf.shape[: len(spec.shape)] == spec.shape and dtype == np.dtype(leaf.dtype)
        fits &= tail == 0 if spec.kind != "key" else tail >= 0
    return None if fits else f"leaf {number} is described as {spec}, and stored as {leaf.dtype}{list(leaf.shape)}"


def _fits(item: RankItem, dtype: np.dtype) -> bool:
    return all(a <= b for a, b in item.box) and volume(item.region) * dtype.itemsize == item.size
