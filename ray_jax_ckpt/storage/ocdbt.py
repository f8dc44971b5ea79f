"""Very many small arrays as one OCDBT database, made by tensorstore, of which only a part is ever in memory.

Seams, found with tensorstore 0.1.84 and pinned by tests/storage/test_ocdbt.py:

* Nodes of the database's tree refer to values by file, offset and length. So files of values can be taken out of the
  memory in which they were made as soon as a batch is committed: later commits never read them.
* The same for several writers' databases, which are merged by copying references: values are not read for that. Each
  database has to be below the merged one's path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow.fs
import tensorstore as ts

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import IntegrityError, PersistError
from ray_jax_ckpt.storage.manifest import FileRecord
from ray_jax_ckpt.storage.plan import DirectoryPlan, PlannedFile
from ray_jax_ckpt.storage.writer import Effort, Read, Target, no_bytes, write_files

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.ocdbt"
# As Orbax calls them where it separates the two.
_VALUES, _NODES = "ocdbt_data/", "ocdbt_meta/"
_FILE_BYTES = 32 << 20
_MAX_FILE_BYTES = 256 << 20
_MAX_FILES = 500


def write_database(
    target: Target, plan: DirectoryPlan, read: Read, effort: Effort, *, writer: int = 0
) -> dict[str, FileRecord]:
    """Writes a writer's share of the arrays. Blocks. If there is no other writer, that is the whole database.

    Takes memory for `effort.streams` files of 32 MiB (256 MiB for states of more than 128 GB) twice, or for the largest
    chunk if that is larger, and for the tree, about 100 bytes per chunk.

    Returns:
        Records of the files that were written.

    Raises:
        PersistError, IntegrityError: As `write_files`.
    """
    entries = [file for file in plan.of(writer) if file.in_database]
    total = sum(file.size for file in plan.files if file.in_database)
    file_bytes = min(_MAX_FILE_BYTES, max(_FILE_BYTES, total // _MAX_FILES))
    prefix = f"{_share(writer)}/" if len(plan.database_writers) > 1 else ""
    database = _Database(prefix, file_bytes)
    records: dict[str, FileRecord] = {}
    for batch in _batches(entries, file_bytes * effort.streams):
        database.add((entry.path, _content(entry, read)) for entry in batch)
        records |= write_files(target, list(_planned(database.take_values())), no_bytes, effort)
    return records | write_files(target, list(_planned(database.take_rest())), no_bytes, effort)


def pack_database(entries: Sequence[PlannedFile], read: Read) -> list[PlannedFile]:
    """Makes one database of few bytes, in memory. Returns its files.

    Raises:
        IntegrityError: What was read is not what was captured.
    """
    database = _Database("", _FILE_BYTES)
    database.add((entry.path, _content(entry, read)) for entry in entries)
    return list(_planned(database.take_rest()))


def merge_databases(target: Target, plan: DirectoryPlan, effort: Effort) -> dict[str, FileRecord]:
    """Makes one database of those of several writers, when they are all written. Called by one process.

    Reads their trees from storage, and no values.

    Returns:
        Records of the files that were written: none if the only writer's is the database already.

    Raises:
        PersistError: One of them cannot be read, or storage did not take the new files.
    """
    shares = [_share(writer) for writer in plan.database_writers]
    if len(shares) < 2:
        return {}
    database = _Database("", _FILE_BYTES)
    for name in shares:
        database.load(dict(_tree_files(target, name)))
    database.merge([f"{name}/" for name in shares])
    return write_files(target, list(_planned(database.take_rest(below=""))), no_bytes, effort)


class _Database:
    """An OCDBT database in memory, from which files are taken as they are done.

    Args:
        prefix: Its place below the checkpoint's directory.
        file_bytes: Size of the files of values.
    """

    def __init__(self, prefix: str, file_bytes: int) -> None:
        # Each database has memory of its own; without a cache nothing is kept there a second time.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._files: Any = ts.KvStore.open("memory://", context=self._context).result()
        self._file_bytes, self._prefix = file_bytes, prefix
        self._database = self._open(prefix)
        self._merged: tuple[str, ...] = ()

    def _open(self, prefix: str) -> Any:
        spec = {
            "driver": "ocdbt",
            "base": f"memory://{prefix}",
            "value_data_prefix": _VALUES,
            "btree_node_data_prefix": _NODES,
            "version_tree_node_data_prefix": _NODES,
            "target_data_file_size": self._file_bytes,
        }
        return ts.KvStore.open(spec, context=self._context).result()

    def add(self, entries: Iterator[tuple[str, bytes]]) -> None:
        """Adds entries, in one commit."""
        transaction = ts.Transaction()
        view = self._database.with_transaction(transaction)
        for key, content in entries:
            view[key] = content
        transaction.commit_async().result()

    def load(self, files: Mapping[str, bytes]) -> None:
        """Puts files of another database in place, to be merged."""
        for path, content in files.items():
            self._files[path] = content

    def merge(self, prefixes: Sequence[str]) -> None:
        """Copies the references of other databases, in one commit."""
        self._merged = tuple(prefixes)
        transaction = ts.Transaction(atomic=True)
        view = self._database.with_transaction(transaction)
        for prefix in prefixes:
            self._open(prefix).experimental_copy_range_to(view).result()
        transaction.commit_async().result()

    def take_values(self) -> Iterator[tuple[str, bytes]]:
        """The files of values that are done; they are gone from here."""
        return self._take(self._prefix + _VALUES)

    def take_rest(self, below: str | None = None) -> Iterator[tuple[str, bytes]]:
        """All other files, when nothing is added any more."""
        return self._take(self._prefix if below is None else below)

    def _take(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        for raw in self._files.list().result():
            path = raw.decode()
            if path.startswith(prefix) and not path.startswith(self._merged or ("\0",)):
                content = self._files[path]
                del self._files[path]
                yield path, content


def _share(writer: int) -> str:
    # Orbax's name for it, which only its own merging looks for.
    return f"ocdbt.process_{writer}"


def _batches(files: Sequence[PlannedFile], limit: int) -> Iterator[list[PlannedFile]]:
    batch, size = [], 0
    for file in files:
        if batch and size + file.size > limit:
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def _content(file: PlannedFile, read: Read) -> bytes:
    if file.content is not None:
        return file.content
    pieces = [piece.cut(read(piece.part, piece.offset, piece.num_bytes)).tobytes() for piece in file.pieces]
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(content) != file.size or (file.digest and digest(content) != file.digest):
        raise IntegrityError(f"{file.path}: the bytes in memory are not those that were captured.")
    return content


def _planned(files: Iterator[tuple[str, bytes]]) -> Iterator[PlannedFile]:
    for path, content in files:
        yield PlannedFile(path, len(content), "", content=content)


def _tree_files(target: Target, name: str) -> Iterator[tuple[str, bytes]]:
    base, files = f"{target.base}/{name}", target.filesystem
    try:
        listed = files.get_file_info(pyarrow.fs.FileSelector(f"{base}/{_NODES.rstrip('/')}", allow_not_found=True))
        paths = [f"{base}/{MANIFEST_FILE}", *(info.path for info in listed if info.type == pyarrow.fs.FileType.File)]
        for path in paths:
            with files.open_input_stream(path) as stream:
                yield f"{name}/{path.rsplit(f'{name}/', 1)[1]}", stream.read()
    except OSError as error:
        raise PersistError(f"{base}, a writer's share of the arrays, cannot be read to be merged: {error}") from error
