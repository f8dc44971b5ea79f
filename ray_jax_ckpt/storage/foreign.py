"""Opens checkpoints that plain Orbax wrote, by v0 or v1: OCDBT or files, zarr 2 or 3.

What Orbax 0.12.8 has on disk, and older ones had:

* A tree's directory holds `_METADATA`: JSON with the path, a type, and a few properties of every leaf. It is the
  checkpoint's directory itself, or below it: `default` (CheckpointManager), `state` (v1.save), `pytree`, or any name.
* An array's name is its path joined with dots. In a directory of that name, or below that prefix of the OCDBT database
  (`manifest.ocdbt`), it is a zarr of version 2, or 3 where `use_zarr3` says so.
* Strings are in `_strings.json`, found by the JSON pointer "/" + name. Numbers are arrays of no dimensions.
* `array_metadatas/process_0` says which arrays are the data of PRNG keys. Without it they are plain uint32.
* Nothing tells what a file has to contain; a missing chunk is noticed, if `store_array_data_equal_to_fill_value`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.fs as pafs

from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError, NotSupportedError
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import Want
from ray_jax_ckpt.model.shards import whole, within
from ray_jax_ckpt.storage.entries import Empty, Entry, TemplateLeaf, index_of
from ray_jax_ckpt.storage.filesystem import describe, join
from ray_jax_ckpt.storage.loopback import PlainFiles
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST, MAX_LEAVES, check_path, parse_object
from ray_jax_ckpt.storage.markers import unmarked
from ray_jax_ckpt.storage.segments import Share, read_small
from ray_jax_ckpt.storage.source import Landings
from ray_jax_ckpt.storage.spares import named
from ray_jax_ckpt.storage.steps import step_of
from ray_jax_ckpt.storage.streams import ASK_S, Deadline, ask, run
from ray_jax_ckpt.storage.tensors import Tensors, num_chunks
from ray_jax_ckpt.values import encode_value

TREE = "_METADATA"
_STRINGS, _ARRAYS, _DATABASE = "_strings.json", "array_metadatas", "manifest.ocdbt"
_PREFERRED = ("state", "default", "pytree")
_EMPTY = {"None": "none", "Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "none"}
_KINDS = {"jax.Array": "array", "np.ndarray": "numpy", "scalar": "scalar", "string": "string"}
_TEMPORARY = ".orbax-checkpoint-tmp"


def find_tree(
    filesystem: pafs.FileSystem, path: str, deadline: Deadline | None = None, *, depth: int = 2
) -> str | None:
    """The directory of the tree of an Orbax checkpoint; None if there is none at or directly below a path.

    Where all that is there is one directory, as in a report to Ray that holds one checkpoint, it is looked into too.

    Args:
        filesystem: Where to look.
        path: At what.
        deadline: When to give up; None: two minutes from now.
        depth: Into how many such directories.

    Raises:
        NoCheckpointError: There are several trees, and none of a usual name; they are named.
        NotSupportedError: It is of the time before `_METADATA`.
        StorageError: The directory cannot be listed.
    """
    if _TEMPORARY in os.path.basename(named(path)):
        return None
    until = deadline or Deadline.after(ASK_S)
    selector, where = pafs.FileSelector(path, allow_not_found=True), describe(filesystem, path)
    listed = ask(lambda: filesystem.get_file_info(selector), f"Listing {where}", until)
    names = {info.base_name: info.type for info in listed}
    if TREE in names:
        return path
    below = sorted(name for name, kind in names.items() if kind == pafs.FileType.Directory and _TEMPORARY not in name)
    asked = [join(path, name, TREE) for name in below]
    infos = ask(lambda: filesystem.get_file_info(asked), f"Looking into {where}", until)
    trees = [name for name, info in zip(below, infos, strict=True) if info.type == pafs.FileType.File]
    steps = [name for name in trees if step_of(name) is not None]
    chosen = next((name for name in _PREFERRED if name in trees), None)
    if chosen is None and trees and not steps:
        if len(trees) > 1:
            raise NoCheckpointError(f"{where} holds several trees: {', '.join(trees[:10])}. Give the path of one.")
        chosen = trees[0]
    if chosen is None and names.get("checkpoint") == pafs.FileType.File:
        raise NotSupportedError(
            f"{where} was written by flax or by an Orbax of the time before {TREE}. Load it with "
            "Orbax and save it again."
        )
    if chosen is None and not steps and len(below) == 1 and depth and step_of(below[0]) is None:
        return find_tree(filesystem, join(path, below[0]), until, depth=depth - 1)
    return None if chosen is None else join(path, chosen)


def unfinished(where: str, *, loadable: bool) -> NoCheckpointError:
    """The error for what is there of a checkpoint of this package without its manifest.

    Args:
        where: In words.
        loadable: Whether Orbax may take it for one of its own.
    """
    advice = (
        " Orbax does not look at the manifest: orbax.checkpoint.v1.load(path, abstract_state) loads what is there, as "
        "far as it is there, and tells no damage."
    )
    return NoCheckpointError(
        f"{where} has files of a checkpoint of this package, but not its {MANIFEST}, which is written last: it is "
        "still being written, its writer was killed, or a copy left the manifest out or somebody removed it. Without "
        "it nothing says what belongs to the checkpoint, and nothing of it is restored. Fetch the manifest from where "
        f"the directory was copied from, or restore another checkpoint.{advice if loadable else ''}"
    )


class Foreign:
    """An open checkpoint of plain Orbax. A context manager; not thread-safe.

    Args:
        filesystem: Where it is.
        path: Of the tree's directory.
        step: The training step, if the path says it.
        streams: Chunks that are read at the same time.
        timeout_s: Bound of opening it, and of each `fetch`.
        available_bytes: Memory that there is; None: not known.

    Raises:
        IntegrityError, NoCheckpointError, NotSupportedError, StorageError, RestoreTimeoutError: It cannot be opened.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        path: str,
        *,
        step: int | None,
        streams: int,
        timeout_s: float,
        available_bytes: int | None = None,
    ) -> None:
        self._filesystem, self._path, self._timeout_s, self._streams = filesystem, path, timeout_s, streams
        self._where = describe(filesystem, path)
        self.step = step
        self.metrics: Mapping[int, Mapping[str, Any]] = {}
        deadline = Deadline.after(timeout_s)
        is_local = isinstance(filesystem, pafs.LocalFileSystem)
        if is_local:
            _check_links(path)
        tree = _json(filesystem, join(path, TREE), deadline)
        custom = tree.get("custom_metadata")
        if isinstance(custom, dict) and FOLDER in custom:
            raise unfinished(self._where, loadable=True)
        files = PlainFiles(filesystem, path, timeout_s)
        is_database = tree.get("use_ocdbt")
        if is_database is None:
            is_database = files.size(_DATABASE) is not None
        self._tensors = Tensors(
            filesystem,
            path,
            None if is_local else files,
            is_database=bool(is_database),
            driver="zarr3" if tree.get("use_zarr3") else "zarr",
            streams=streams,
            complete=bool(tree.get("store_array_data_equal_to_fill_value")),
        )
        self._landings = Landings(self._where, available_bytes)
        try:
            self._content = unmarked(*self._read(tree, deadline), self._whole)
        except BaseException:
            self._tensors.close()
            raise

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.close()

    @property
    def sharded(self) -> frozenset[int]:
        """See `Source`."""
        return frozenset(number for number, entry in enumerate(self._content.entries) if entry.num_chunks > 1)

    def indices(self, template: Sequence[TemplateLeaf] | None) -> list[Index]:
        """See `Source`."""
        found = self._content
        data = None if found.metadata is None else {"value": encode_value(found.metadata)}
        return [index_of(found.entries, found.empty, template, self.step, data)]

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """See `Source`.

        Raises:
            IntegrityError, StorageError, RestoreTimeoutError: The bytes cannot be had.
            RestoreError: There is not enough memory.
        """
        deadline = Deadline.after(self._timeout_s)
        results, wanted = self._landings.take(wants, dtypes), []
        for want, result in zip(wants, results, strict=True):
            (stored, _), *_ = want.found()
            entry = self._content.entries[stored.item.leaf]
            if entry.content is not None:
                result[...] = entry.content[within(want.box, whole(entry.shape))]
                continue
            wanted.append((entry.name, Share(result, want.box, whole(entry.shape), want.box)))
        self._run(wanted, deadline)
        return results

    def _run(self, wanted: Sequence[tuple[str, Share]], deadline: Deadline) -> None:
        run(self._tensors.jobs(wanted, deadline), streams=self._streams, deadline=deadline)

    def _whole(self, entry: Entry) -> np.ndarray:
        """All of an array."""
        found, box = np.empty(entry.shape, entry.dtype), whole(entry.shape)
        self._run([(entry.name, Share(found, box, box, box))], Deadline.after(self._timeout_s))
        return found

    # What is in it.

    def _read(self, tree: Mapping[str, Any], deadline: Deadline) -> tuple[list[Entry], list[Empty]]:
        leaves, empty, before = [], [], 0
        try:
            described = list(tree["tree_metadata"].values())
            for one in described:
                keys = tuple(map(_key, one["key_metadata"]))
                properties = one["value_metadata"]
                kind, skipped = str(properties["value_type"]), bool(properties.get("skip_deserialize"))
                if kind in _EMPTY:
                    empty.append(Empty(keys, _EMPTY[kind], before))
                elif not skipped:
                    leaves.append((keys, kind))
                    before += 1
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{self._where}/{TREE} is damaged: {error!r}.") from None
        if len(described) > MAX_LEAVES:
            raise IntegrityError(f"{self._where} has {len(described)} leaves, and {MAX_LEAVES} are read at most.")
        return self._described(leaves, deadline), empty

    def _described(self, leaves: Sequence[tuple[Any, str]], deadline: Deadline) -> list[Entry]:
        names = [".".join(str(key) for _, key in keys) for keys, _ in leaves]
        unknown = [f"{name} ({kind})" for name, (_, kind) in zip(names, leaves, strict=True) if kind not in _KINDS]
        if unknown:
            raise NotSupportedError(f"{self._where} has leaves of types that only their writer knows: {unknown[:5]}.")
        for name, (_, kind) in zip(names, leaves, strict=True):
            _check_name(name, kind, self._where)
        arrays = [name for name, (_, kind) in zip(names, leaves, strict=True) if kind != "string"]
        tensors = dict(zip(arrays, self._tensors.open(arrays, deadline), strict=True))
        impls = self._key_impls(deadline) if "jax.Array" in {kind for _, kind in leaves} else {}
        texts = _json(self._filesystem, join(self._path, _STRINGS), deadline) if len(arrays) < len(names) else {}
        numbers = self._numbers([name for name in arrays if not tensors[name].shape], deadline)
        entries = []
        for name, (keys, kind) in zip(names, leaves, strict=True):
            if kind == "string":
                entries.append(Entry(keys, "string", value=_text(texts, name, self._where)))
                continue
            array, impl = tensors[name], impls.get(name) if kind == "jax.Array" else None
            found: Any = "key" if impl else _KINDS[kind]
            shape, dtype = tuple(array.shape), array.dtype.numpy_dtype
            if impl and not (shape and dtype == np.uint32):
                raise IntegrityError(f"{self._where} has {dtype.name}{list(shape)} as the data of PRNG keys {name!r}.")
            entries.append(
                Entry(keys, found, shape, dtype, impl, numbers.get(name), name, num_chunks=num_chunks(array))
            )
        return entries

    def _numbers(self, names: Sequence[str], deadline: Deadline) -> dict[str, Any]:
        """What has no dimensions: it may be asked for as a plain value, which is not fetched later."""
        arrays = self._tensors.open(names, deadline)
        found = {name: np.empty((), array.dtype.numpy_dtype) for name, array in zip(names, arrays, strict=True)}
        self._run([(name, Share(target, (), (), ())) for name, target in found.items()], deadline)
        return {name: target[()] for name, target in found.items()}

    def _key_impls(self, deadline: Deadline) -> dict[str, str]:
        """PRNG implementation of each array that is the data of keys."""
        path = join(self._path, _ARRAYS)
        selector, what = pafs.FileSelector(path, allow_not_found=True), f"Listing {describe(self._filesystem, path)}"
        listed = ask(lambda: self._filesystem.get_file_info(selector), what, deadline)
        files = sorted(info.path for info in listed if info.base_name.startswith("process_"))
        if not files:
            return {}
        # All processes write the same.
        described = _json(self._filesystem, files[0], deadline)
        try:
            arrays = [one["array_metadata"] for one in described.get("array_metadatas", ())]
            impls = {str(one["param_name"]): (one.get("ext_metadata") or {}).get("random_key_impl") for one in arrays}
        except (AttributeError, KeyError, TypeError) as error:
            raise IntegrityError(f"{describe(self._filesystem, files[0])} is damaged: {error!r}.") from None
        return {name: str(impl) for name, impl in impls.items() if impl}


def _key(raw: Mapping[str, Any]) -> tuple[str, Any]:
    return ("s", int(raw["key"])) if raw["key_type"] == 1 else ("d", str(raw["key"]))


def _check_name(name: str, kind: str, where: str) -> None:
    """A name is part of a path, and is not to lead out of the directory."""
    if kind == "string" or not name:
        return
    try:
        check_path(name)
    except ValueError as error:
        raise IntegrityError(f"{where} has a leaf whose name cannot be that of an array: {error}.") from None


def _check_links(path: str) -> None:
    """No symbolic link in a local directory may lead out of it."""
    root = os.path.realpath(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            found = os.path.join(folder, name)
            if os.path.islink(found) and not f"{os.path.realpath(found)}/".startswith(f"{root}/"):
                raise IntegrityError(f"{found} is a link to {os.path.realpath(found)}, outside of the checkpoint.")


def _json(filesystem: pafs.FileSystem, path: str, deadline: Deadline) -> dict[str, Any]:
    return parse_object(read_small(filesystem, path, deadline), describe(filesystem, path))


def _text(texts: Mapping[str, Any], name: str, where: str) -> str:
    """A string by its name, which is a JSON pointer."""
    found: Any = texts
    for key in name.split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise IntegrityError(f"{where}/{_STRINGS} lacks the string {name!r}.")
    return found
