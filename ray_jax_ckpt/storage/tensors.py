"""Arrays that tensorstore reads: those in an OCDBT database, and those that plain Orbax wrote."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import tensorstore as ts

from ray_jax_ckpt.errors import CheckpointError, IntegrityError, NotSupportedError, StorageError
from ray_jax_ckpt.model.shards import Box, extent
from ray_jax_ckpt.storage.described import DATABASE, NAMES, check, check_file
from ray_jax_ckpt.storage.filesystem import describe
from ray_jax_ckpt.storage.loopback import Files, FileServer
from ray_jax_ckpt.storage.segments import PIECE_BYTES, Share
from ray_jax_ckpt.storage.streams import Deadline, Job

_INDEX_CACHE_BYTES = 64 << 20
_BAND_BYTES = 4 * PIECE_BYTES
_SMALL_CHUNK_BYTES = 64 << 20
# Opened at a time: each takes a request or two.
_BATCH = 256
_SLICE_S = 0.2


class Tensors:
    """The arrays of a checkpoint's directory, by name. A context manager; any thread may read.

    Args:
        filesystem: Where it is.
        path: Of the directory.
        files: Its files, for a filesystem that tensorstore does not read by itself; None for the local one.
        is_database: Whether the arrays are in an OCDBT database.
        driver: "zarr" or "zarr3".
        streams: Requests at the same time.
        complete: Whether a chunk that is missing is an error; else its elements are the fill value.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        path: str,
        files: Files | None,
        *,
        is_database: bool,
        driver: str,
        streams: int,
        complete: bool = True,
    ) -> None:
        self._where, self._is_database, self._driver = describe(filesystem, path), is_database, driver
        self._complete = complete
        self._path, self._arrays = path.rstrip("/"), dict[str, ts.TensorStore]()
        self._server = None if files is None else FileServer(files)
        limit = {"limit": streams}
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#index": {"total_bytes_limit": _INDEX_CACHE_BYTES},
                "data_copy_concurrency": limit,
                "file_io_concurrency": limit,
                "http_request_concurrency": limit,
                "http_request_retries": {"max_retries": 2, "initial_delay": "100ms", "max_delay": "1s"},
            }
        )

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the serving of files."""
        self._arrays.clear()
        if self._server is not None:
            self._server.close()

    def open(self, names: Sequence[str], deadline: Deadline) -> list[ts.TensorStore]:
        """Arrays; those that were opened before, again.

        Raises:
            IntegrityError: There is none of that name, or it is none that can be read.
            StorageError, RestoreTimeoutError: It cannot be opened.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self._arrays]
        for first in range(0, len(missing), _BATCH):
            batch = missing[first : first + _BATCH]
            self._check_described(batch, deadline)
            futures = [ts.open(self._spec(name), open=True, read=True, context=self._context) for name in batch]
            for name, future in zip(batch, futures, strict=True):
                array = self._result(future, f"array {name!r}", deadline)
                self._check_chunks(name, array)
                self._check_codec(name, array)
                self._arrays[name] = array
        return [self._arrays[name] for name in names]

    def jobs(self, wanted: Sequence[tuple[str, Share]], deadline: Deadline) -> list[Job]:
        """What reads the boxes that shares take of arrays: each job a few chunks, or a large one.

        Raises as `open`, and IntegrityError if an array is not of the shape or type that the checkpoint says.
        """
        found = []
        arrays = self.open([name for name, _ in wanted], deadline)
        for array, (name, share) in zip(arrays, wanted, strict=True):
            dtype = share.target.dtype
            if array.dtype.numpy_dtype != dtype.newbyteorder("=") or array.shape != extent(share.stored_box):
                raise IntegrityError(
                    f"array {name!r} in {self._where} is {array.dtype.name}{list(array.shape)}, and the checkpoint "
                    f"says {dtype}{list(extent(share.stored_box))}."
                )
            for box in bands(share.shared, _chunks(array), dtype.itemsize, _BAND_BYTES):
                part = Share(share.target, share.target_box, share.stored_box, box)
                what = f"Reading array {name!r} in {self._where}"
                found.append(Job(what, partial(self._read, name, array, part, deadline)))
        return found

    def _read(self, name: str, array: ts.TensorStore, share: Share, deadline: Deadline) -> None:
        what, view, dtype = f"array {name!r}", share.view, share.target.dtype
        deadline.check(f"Reading {what} in {self._where}")
        source = array[tuple(slice(*side) for side in share.shared)]
        # tensorstore has elements in this machine's byte order only.
        found = view if dtype.isnative else np.empty(view.shape, dtype.newbyteorder("="))
        target = ts.array(found, copy=False, write=True)
        self._result(target.write(source.translate_to[0] if share.shared else source), what, deadline)
        if not dtype.isnative:
            view[...] = found

    def _check_described(self, names: Sequence[str], deadline: Deadline) -> None:
        """Of what is served the server looks at the files."""
        described = [f"{name}/{NAMES[self._driver]}" if name else NAMES[self._driver] for name in names]
        if self._server is None:
            for name in [DATABASE] if self._is_database else described:
                check_file(f"{self._path}/{name}")
        if self._is_database:
            database = self._result(ts.KvStore.open(self._below(""), context=self._context), "the database", deadline)
            for name, future in [(name, database.read(name)) for name in described]:
                raw = self._result(future, f"{name!r}", deadline).value
                if raw:
                    check(raw, f"{self._where}/{name}")

    def _below(self, prefix: str) -> dict[str, Any]:
        """The kvstore of what is below a prefix, in the directory or its database."""
        if self._server is None:
            root: dict[str, Any] = {"driver": "file", "path": f"{self._path}/"}
            below = {"driver": "file", "path": f"{self._path}/{prefix}"}
        else:
            root, below = self._server.spec(""), self._server.spec(prefix)
        if self._is_database:
            below = {"driver": "ocdbt", "base": root, "path": prefix, "cache_pool": "cache_pool#index"}
        return below

    def _spec(self, name: str) -> dict[str, Any]:
        below = self._below(f"{name}/" if name else "")
        return {"driver": self._driver, "kvstore": below, "fill_missing_data_reads": not self._complete}

    def _result(self, future: Any, what: str, deadline: Deadline) -> Any:
        try:
            while True:
                deadline.check(f"Reading {what} in {self._where}")
                # In slices: it is in vain when another read has failed.
                with contextlib.suppress(TimeoutError):
                    return future.result(timeout=min(deadline.left_s, _SLICE_S))
        except CheckpointError:
            raise
        except (ValueError, OSError, RuntimeError) as error:
            raise self._meaning(what, error) from error

    def _meaning(self, what: str, error: Exception) -> CheckpointError:
        if self._server is not None and self._server.error is not None:
            return self._server.error
        # Its first line; what follows is the specification.
        text = str(error).split(" [", 1)[0]
        transient = any(code in text for code in ("UNAVAILABLE", "PERMISSION_DENIED", "DEADLINE_EXCEEDED", "UNKNOWN"))
        kind = StorageError if transient else IntegrityError
        return kind(f"{what} in {self._where} cannot be read: {text}")

    def _check_codec(self, name: str, array: ts.TensorStore) -> None:
        """The others are decoded up to the size of the chunk (0.1.86); this one to what is compressed claims, 2 GiB."""
        codec = array.codec
        if codec is not None and '"blosc"' in json.dumps(codec.to_json()):
            raise NotSupportedError(
                f"array {name!r} in {self._where} is compressed with blosc, which Orbax never writes and whose chunks "
                "can decode to more than they should. Load it with another program and save it again."
            )

    def _check_chunks(self, name: str, array: ts.TensorStore) -> None:
        """A chunk is decoded whole: one that claims to be larger than its array would take any amount of memory."""
        itemsize = array.dtype.numpy_dtype.itemsize
        size, most = math.prod(_chunks(array)) * itemsize, math.prod(array.shape) * itemsize
        if size > max(_SMALL_CHUNK_BYTES, 2 * most):
            raise IntegrityError(
                f"array {name!r} in {self._where} has {most} bytes, and claims that its chunks have {size} each."
            )


def num_chunks(array: ts.TensorStore) -> int:
    """Files, or entries of a database, that an array may have: of what a jax.Array was, shards."""
    sizes = array.chunk_layout.write_chunk.shape or array.shape
    return math.prod(-(-side // (size or side or 1)) for side, size in zip(array.shape, sizes, strict=True))


def _chunks(array: ts.TensorStore) -> tuple[int, ...]:
    """Of what is decoded at a time."""
    return tuple(size or 1 for size in array.chunk_layout.read_chunk.shape or array.shape)


def bands(box: Box, chunks: Sequence[int], itemsize: int, limit_bytes: int) -> Iterator[Box]:
    """A box cut along the borders of chunks, so that each piece touches chunks of `limit_bytes`, or a single one."""
    touched = [(start // chunk, -(-stop // chunk)) for (start, stop), chunk in zip(box, chunks, strict=True)]
    size = itemsize * math.prod((last - first) * chunk for (first, last), chunk in zip(touched, chunks, strict=True))
    axis = max(range(len(box)), key=lambda axis: touched[axis][1] - touched[axis][0], default=None)
    if size <= limit_bytes or axis is None or touched[axis][1] - touched[axis][0] < 2:
        yield box
        return
    (start, stop), cut = box[axis], sum(touched[axis]) // 2 * chunks[axis]
    for side in ((start, cut), (cut, stop)):
        yield from bands((*box[:axis], side, *box[axis + 1 :]), chunks, itemsize, limit_bytes)
