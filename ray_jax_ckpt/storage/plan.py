"""Which files make up a checkpoint of a generation, and where in the generation their bytes are. Pure.

Who has the indices of all ranks knows every file, its size and, as far as it was digested at capture, its digest before
anything is written. So several stores can write one checkpoint without talking to each other.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import UnsupportedLeafError
from ray_jax_ckpt.model.catalog import Catalog, Stored
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.shards import Box, extent, volume, whole
from ray_jax_ckpt.storage.grid import DATABASE_CHUNK_BYTES, chunk_shape, chunks_of, num_chunks, split
from ray_jax_ckpt.storage.manifest import (
    FORMAT,
    FileRecord,
    LeafRecord,
    Manifest,
    RankBlob,
    RankItem,
    RankRecord,
    rank_blob,
    rank_file,
    raw_leaf,
)
from ray_jax_ckpt.storage.names import leaf_names
from ray_jax_ckpt.storage.orbax_types import orbax_types, strings_of
from ray_jax_ckpt.storage.zarr import as_scalar, describe_array
from ray_jax_ckpt.values import dtype_name

MAX_OBJECTS = 2_000
"""From here on arrays go into an OCDBT database: object stores charge and wait for each object, and disks sync each."""
_MAX_CHUNKS = 100_000
_MAX_ORBAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Piece:
    """Bytes of a generation: `num_bytes` at `offset` of a part, or of these what is `inner` of the array `outer`."""

    part: str
    offset: int
    num_bytes: int
    outer: Box | None = None
    inner: Box | None = None
    itemsize: int = 1

    @property
    def size(self) -> int:
        """Bytes that it gives."""
        return self.num_bytes if self.inner is None else volume(self.inner) * self.itemsize

    def cut(self, content: np.ndarray) -> np.ndarray:
        """The bytes that are meant, from those at the place: uint8, contiguous, a view where it can be one."""
        if self.inner is None or self.outer is None:
            return content
        array = content.reshape(*extent(self.outer), self.itemsize)
        where = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(self.inner, self.outer, strict=True))
        return np.ascontiguousarray(array[where]).reshape(-1)


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written.

    Attributes:
        path: In the checkpoint.
        size: In bytes.
        digest: "" if it is only known when the file is written.
        content: All of it; or else
        pieces: what it consists of.
        in_database: It is an entry of the OCDBT database, not a file.
        writer: Rank whose store is to write it.
    """

    path: str
    size: int
    digest: str
    content: bytes | None = field(default=None, repr=False)
    pieces: tuple[Piece, ...] = field(default=(), repr=False)
    in_database: bool = False
    writer: int = 0


@dataclass(frozen=True)
class DirectoryPlan:
    """A checkpoint that is to be written.

    Attributes:
        files: All but the manifest; those with `in_database` become files of the database, which has names of its own.
        head: The manifest without files.
    """

    files: tuple[PlannedFile, ...] = field(repr=False)
    head: Manifest = field(repr=False)

    @property
    def database_writers(self) -> list[int]:
        """Who has entries of the OCDBT database to write; nobody if there is none."""
        return sorted({file.writer for file in self.files if file.in_database})

    @property
    def num_bytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(file.size for file in self.files)

    def files_of(self, rank: int) -> list[PlannedFile]:
        """What one rank's store is to write as files."""
        return [file for file in self.of(rank) if not file.in_database]

    def of(self, rank: int) -> list[PlannedFile]:
        """What one rank's store is to write, entries of the database too."""
        return [file for file in self.files if file.writer == rank]

    def manifest(self, records: Mapping[str, FileRecord]) -> Manifest:
        """The manifest of what has been written.

        Raises:
            ValueError: A file is missing, or is not what was planned.
        """
        for file in self.files:
            if file.in_database:
                continue
            found = records.get(file.path)
            if found is None or found.size != file.size or (file.digest and found.digest != file.digest):
                raise ValueError(f"{file.path}: planned {file.size} bytes {file.digest}, and written {found}")
        fields = {name: getattr(self.head, name) for name in Manifest.model_fields}
        return Manifest(**{**fields, "files": dict(records)})


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself beside its content.

    Attributes:
        run: Name of the run.
        step: None: it has none, whatever the generation says.
        created_at_s: Unix time.
        custom: What Orbax is to show as the checkpoint's `custom_metadata`; plain JSON.
    """

    run: str = ""
    step: int | None = None
    created_at_s: float = 0.0
    custom: Mapping[str, Any] = field(default_factory=dict)


def needs_database(indices: Sequence[Index]) -> bool:
    """Whether so many leaves and shards are one OCDBT database instead of files."""
    catalog = Catalog.of(indices)
    specs = [LeafSpec.from_json(dict(leaf)) for leaf in indices[0].layout.leaves]
    objects = sum(2 if s.kind == "value" else 1 + len(_items(catalog, indices[0], n)) for n, s in enumerate(specs))
    return objects > MAX_OBJECTS


def plan_files(
    indices: Sequence[Index],
    orbax: Mapping[str, bytes],
    about: About,
    *,
    holders: Mapping[str, Sequence[int]] | None = None,
    num_writers: int | None = None,
) -> DirectoryPlan:
    """Plans a checkpoint.

    Args:
        indices: Of all ranks, in rank order.
        orbax: Orbax's metadata files, as `orbax_metadata.orbax_files` makes them.
        about: What it says of itself.
        holders: Writers that can write the bytes of each part, by number. None: the ranks that captured it.
        num_writers: How many there are. None: as many as ranks.

    Raises:
        UnsupportedLeafError: The tree cannot be written (see `names`).
    """
    return _Planner(indices, orbax, about, holders or _keepers(indices), num_writers or len(indices)).plan()


def pack_orbax(files: Mapping[str, bytes]) -> str:
    """Orbax's metadata files as text that travels in `Layout.orbax`."""
    text = json.dumps({path: content.decode() for path, content in files.items()})
    return base64.b64encode(zlib.compress(text.encode())).decode()


def orbax_of(indices: Iterable[Index]) -> dict[str, bytes]:
    """Orbax's metadata files of a generation, from the index of the rank that made them.

    Raises:
        ValueError: There are none in it, or they are damaged.
    """
    packed = next((index.layout.orbax for index in indices if index.layout.orbax), None)
    if packed is None:
        raise ValueError("the snapshot was taken by a group that did not write to storage")
    try:
        # Bounded: what a peer sends may be small and become large.
        text = zlib.decompressobj().decompress(base64.b64decode(packed), _MAX_ORBAX_BYTES)
        return {path: content.encode() for path, content in json.loads(text).items()}
    except (zlib.error, binascii.Error, AttributeError) as error:
        raise ValueError(f"not Orbax's metadata files: {error!r}") from error


def for_database(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Orbax's metadata files of a checkpoint whose arrays are in an OCDBT database, from those of one without."""
    return {
        path: _json(_changed(json.loads(content), "use_ocdbt", True)) if b'"use_ocdbt"' in content else content
        for path, content in files.items()
    }


def _changed(node: Any, key: str, value: Any) -> Any:
    if isinstance(node, dict):
        return {k: value if k == key else _changed(v, key, value) for k, v in node.items()}
    return [_changed(one, key, value) for one in node] if isinstance(node, list) else node


class _Planner:
    """See `plan_files`."""

    def __init__(
        self,
        indices: Sequence[Index],
        orbax: Mapping[str, bytes],
        about: About,
        holders: Mapping[str, Sequence[int]],
        num_writers: int,
    ) -> None:
        self._indices, self._orbax, self._about = indices, orbax, about
        self._holders, self._num_writers = holders, num_writers
        self._own = indices[0]
        self._catalog = Catalog.of(indices)
        self._specs = [LeafSpec.from_json(dict(leaf)) for leaf in self._own.layout.leaves]
        self._names = leaf_names(self._specs)
        self._types = orbax_types(self._specs, self._own.values)
        self._ocdbt = bool(json.loads(orbax["_METADATA"])["use_ocdbt"])

    def plan(self) -> DirectoryPlan:
        leaves = tuple(self._leaf(number) for number in range(len(self._specs)))
        files = [*self._metadata(), *self._ranks()]
        for number, leaf in enumerate(leaves):
            files += self._value(number, leaf) if leaf.form == "value" else self._array(number, leaf)
        planned = tuple(_assigned(files, self._holders, self._num_writers))
        _check_distinct(planned)
        return DirectoryPlan(planned, self._head(leaves))

    def _head(self, leaves: tuple[LeafRecord, ...]) -> Manifest:
        generation = self._own.generation
        # Without the files it is no whole manifest yet, and is checked when it becomes one.
        return Manifest.model_construct(
            format=FORMAT,
            run=self._about.run,
            attempt=generation.attempt,
            restores=generation.restores,
            step=self._about.step,
            created_at_s=self._about.created_at_s,
            world_size=len(self._indices),
            structure=self._own.layout.structure,
            metrics={index.layout.rank: dict(index.metrics) for index in self._indices if index.metrics},
            leaves=leaves,
            skeleton=self._own.layout.skeleton,
            values=dict(self._own.values),
            files={},
        )

    # Leaves.

    def _leaf(self, number: int) -> LeafRecord:
        spec, name = self._specs[number], self._names[number]
        local = number in self._own.layout.local
        if spec.kind == "value":
            return LeafRecord(spec=spec.to_json(), name=name, form="value", local=local)
        boxes = [stored.item.box for stored in _items(self._catalog, self._own, number)]
        # Of a key the dimensions of its data lie behind its own, and are never cut.
        shape = spec.shape + tuple(stop for _, stop in (boxes[0] if boxes else ())[len(spec.shape) :])
        chunks = chunk_shape(shape, [whole(shape), *boxes])
        if num_chunks(shape, chunks) > max(_MAX_CHUNKS, len(boxes)):
            raise UnsupportedLeafError(
                f"leaf {spec.path} of shape {shape} is cut so unevenly that storing it would take "
                f"{num_chunks(shape, chunks)} chunks of {chunks}. Shard it evenly."
            )
        raw = self._types[number] == "None"
        if self._ocdbt and not raw:
            chunks = split(chunks, np.dtype(spec.dtype).itemsize, DATABASE_CHUNK_BYTES)
        form = "raw" if raw else "ocdbt" if self._ocdbt else "chunks"
        where = raw_leaf(number) if raw else name
        return LeafRecord(
            spec=spec.to_json(), name=where, form=form, shape=shape, dtype=spec.dtype, chunks=chunks, local=local
        )

    def _array(self, number: int, leaf: LeafRecord) -> Iterator[PlannedFile]:
        chunks, done = leaf.chunks or (), set()
        if leaf.form != "raw":
            yield self._entry(leaf.path("zarr.json"), describe_array(leaf.shape, leaf.dtype, chunks))
        for stored in _items(self._catalog, self._own, number):
            if not volume(stored.item.box):
                continue
            for key, box in chunks_of(stored.item.box, chunks):
                if key not in done:
                    done.add(key)
                    yield self._chunk(leaf, leaf.path(key), stored, box)

    def _chunk(self, leaf: LeafRecord, path: str, stored: Stored, box: Box) -> PlannedFile:
        item = stored.item
        known = stored.digest if item.box == box else ""
        piece = Piece(stored.part, item.offset, item.num_bytes)
        if item.box != box:
            piece = replace(piece, outer=item.box, inner=box, itemsize=leaf.itemsize)
        return PlannedFile(path, piece.size, known, pieces=(piece,), in_database=leaf.form == "ocdbt")

    def _value(self, number: int, leaf: LeafRecord) -> Iterator[PlannedFile]:
        """The array without dimensions that Orbax has for a number."""
        array = None if self._types[number] in ("None", "string") else as_scalar(self._own.values[number])
        if array is not None:
            yield self._entry(leaf.path("zarr.json"), describe_array((), dtype_name(array.dtype), ()))
            yield self._entry(leaf.path("c"), array.tobytes())

    def _entry(self, path: str, content: bytes) -> PlannedFile:
        return replace(_literal(path, content), in_database=self._ocdbt)

    # Beside the leaves.

    def _metadata(self) -> Iterator[PlannedFile]:
        now_ns = int(self._about.created_at_s * 1e9)
        for path, content in self._orbax.items():
            if path == "_CHECKPOINT_METADATA":
                times = {"init_timestamp_nsecs": now_ns, "commit_timestamp_nsecs": now_ns}
                content = _json({**json.loads(content), **times, "custom_metadata": dict(self._about.custom)})
            yield _literal(path, content)
        strings = strings_of(self._specs, self._types, self._own.values)
        if strings:
            yield _literal("_strings.json", _json(strings))
        # Where directories cannot be renamed, Orbax takes one without this for a checkpoint that is being written.
        yield _literal(
            "commit_success.txt", b"Written by ray_jax_ckpt; complete if ray_jax_ckpt/manifest.json is there."
        )

    def _ranks(self) -> Iterator[PlannedFile]:
        for index in self._indices:
            yield from self._rank(index)

    def _rank(self, index: Index) -> Iterator[PlannedFile]:
        rank, host = index.layout.rank, index.layout.host_part.id
        pieces: list[Piece] = []
        items, at = [], 0
        for stored in self._differing(index):
            item = stored.item
            items.append(RankItem(leaf=item.leaf, box=item.box, offset=at, size=item.num_bytes, digest=stored.digest))
            pieces.append(Piece(host, item.offset, item.num_bytes))
            at += item.num_bytes
        blobs = []
        for offset, size, found in index.blobs:
            blobs.append(RankBlob(offset=at, size=size, digest=found))
            pieces.append(Piece(host, offset, size))
            at += size
        first = self._own
        values = {n: value for n, value in index.values.items() if n not in first.values or value != first.values[n]}
        specs = {
            n: dict(index.layout.leaves[n])
            for n in index.layout.local
            if index is not first and index.layout.leaves[n] != first.layout.leaves[n]
        }
        record = RankRecord(
            rank=rank, data=index.data, blobs=tuple(blobs), values=values, specs=specs, items=tuple(items)
        )
        yield _literal(rank_file(rank), record.to_bytes())
        if at:
            yield PlannedFile(rank_blob(rank), at, "", pieces=tuple(pieces))

    def _differing(self, index: Index) -> Iterator[Stored]:
        """Items of local leaves that are not what rank 0 has, or not known to be."""
        if index is self._own:
            return
        for number in sorted(index.layout.local):
            mine = list(self._catalog.local(index.layout.rank, number))
            first = list(self._catalog.local(self._own.layout.rank, number))
            known = all(stored.digest for stored in mine)
            if not known or [(s.item.box, s.digest) for s in mine] != [(s.item.box, s.digest) for s in first]:
                yield from mine


def _items(catalog: Catalog, own: Index, number: int) -> Sequence[Stored]:
    return [*(catalog.local(own.layout.rank, number) if number in own.layout.local else catalog.shared(number))]


def _keepers(indices: Sequence[Index]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index in indices:
        for part in index.layout.parts:
            found.setdefault(part.id, []).append(index.layout.rank)
    return found


def _assigned(
    files: Iterable[PlannedFile], holders: Mapping[str, Sequence[int]], num_writers: int
) -> Iterator[PlannedFile]:
    """Gives each file to the rank with the least to write among those that hold its bytes: the same on every rank."""
    load = [0] * num_writers
    everybody = [(0, rank) for rank in range(num_writers)]
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        if not file.pieces:
            # Content that all have: whoever has the least.
            while everybody[0][0] != load[everybody[0][1]]:
                heapq.heapreplace(everybody, (load[everybody[0][1]], everybody[0][1]))
            rank = everybody[0][1]
        else:
            able = set.intersection(*({*holders[piece.part]} for piece in file.pieces))
            rank = min(able, key=lambda rank: (load[rank], rank))
        load[rank] += file.size
        yield replace(file, writer=rank)


def _check_distinct(files: Sequence[PlannedFile]) -> None:
    """Names are checked one by one; this is what must never happen all the same."""
    if len({file.path for file in files}) < len(files):
        raise UnsupportedLeafError("two files of the checkpoint would have the same path")


def _literal(path: str, content: bytes) -> PlannedFile:
    return PlannedFile(path, len(content), digest(content), content=content)


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()
