"""Leaves of a checkpoint that says less of them than a snapshot does: only names, and what is stored.

Orbax keeps the names on a leaf's path, but not whether one was a dictionary's key, an int, or a field; and a number may
have been Python's, numpy's, or an array of no dimensions. The tree that is asked for tells; without one, names are keys
of dictionaries and positions in lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.leaves import LeafKind, LeafSpec
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Generation, whole
from ray_jax_ckpt.values import dtype_name, encode_value, value_type_name

PART = "arrays"

TemplateLeaf = tuple[str, Sequence[Sequence[Any]], Any]
"""Path, typed key path, and the leaf itself, which may be abstract."""

_PYTHON: Mapping[str, type] = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
_KEY_DATA_DIMS = 1


@dataclass(frozen=True)
class Entry:
    """A leaf that is stored.

    Attributes:
        keys: Its typed key path, of "d" and "s" only.
        kind: "array", "key" and "numpy" as in `LeafSpec`; "scalar" for one that was a number, "string" for text.
        shape: Of the stored array.
        dtype: Of the stored array.
        key_impl: Of a key.
        value: The content, of a string and of what has no dimensions.
        name: Of the stored array.
        content: Of an array that is not stored as one.
        num_chunks: Of the stored array.
    """

    keys: tuple[tuple[str, Any], ...]
    kind: Literal["array", "key", "numpy", "scalar", "string"]
    shape: tuple[int, ...] = ()
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.uint8))
    key_impl: str | None = None
    value: Any = None
    name: str = ""
    content: np.ndarray | None = field(default=None, repr=False)
    num_chunks: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """What of its path any tree of the same names has."""
        return tuple(str(key) for _, key in self.keys)


@dataclass(frozen=True)
class Empty:
    """A node without content: "dict", "list", "tuple" or "none", and the number of leaves before it."""

    keys: tuple[tuple[str, Any], ...]
    kind: str
    before: int


def index_of(
    entries: Sequence[Entry],
    empty: Sequence[Empty],
    template: Sequence[TemplateLeaf] | None,
    step: int | None,
    data: Any = None,
) -> Index:
    """The index of a group of one with these leaves, each in one piece, named as in the tree that is asked for."""
    asked = {tuple(str(key) for _, key in keys): (path, keys, leaf) for path, keys, leaf in template or ()}
    specs, values, contents = [], {}, {True: [], False: []}
    for number, entry in enumerate(entries):
        path, keys, leaf = asked.get(entry.names, (_keystr(entry.keys), entry.keys, None))
        kind = _kind(entry, leaf)
        if kind == "value":
            value = _value(entry, leaf)
            values[number] = encode_value(value)
            specs.append(_spec(path, keys, "value", (), value_type_name(value), None))
            continue
        shape = entry.shape[: len(entry.shape) - _KEY_DATA_DIMS] if kind == "key" else entry.shape
        weak = kind == "array" and bool(getattr(leaf, "weak_type", False))
        specs.append(_spec(path, keys, kind, shape, dtype_name(entry.dtype), entry.key_impl, weak))
        # Only its place counts, not its bytes.
        contents[kind == "numpy"].append((number, whole(entry.shape), 1))
    parts = lay_out([(PART, (), False, contents[False]), (host_part_id(0), (), False, contents[True])])
    layout = Layout(
        rank=0,
        world_size=1,
        structure="",
        leaves=specs,
        local=frozenset(values) | {number for number, *_ in contents[True]},
        parts=parts,
        skeleton=json.dumps({"nodes": [[one.before, list(map(list, one.keys)), one.kind] for one in empty]}),
    )
    digests = {part.id: [""] * len(part.items) for part in parts}
    return Index(Generation(0, 0, step or 0), layout, digests, values, data)


def _spec(
    path: str,
    keys: Sequence[Sequence[Any]],
    kind: LeafKind,
    shape: tuple[int, ...],
    dtype: str,
    impl: str | None,
    weak_type: bool = False,
) -> dict[str, Any]:
    return LeafSpec(path, kind, shape, dtype, weak_type, impl, [list(key) for key in keys]).to_json()


def _keystr(keys: Sequence[tuple[str, Any]]) -> str:
    return "".join(f"[{key!r}]" for _, key in keys)


def _kind(entry: Entry, leaf: Any) -> LeafKind:
    """As what a leaf comes back: what was stored decides, and where that is not known, what is asked for."""
    if entry.kind == "string":
        return "value"
    if entry.kind == "key":
        return "key"
    if leaf is None or entry.shape:
        return "value" if entry.kind == "scalar" else entry.kind
    if isinstance(leaf, np.ndarray):
        return "numpy"
    if isinstance(leaf, bool | int | float | complex | np.generic):
        return "value"
    return "array" if entry.kind == "scalar" else entry.kind


def _value(entry: Entry, leaf: Any) -> Any:
    """The content, of the type that is asked for where no bit is lost by it; else the difference is reported."""
    return np.asarray(entry.value)[()] if isinstance(leaf, np.generic) else python_value(entry)


def python_value(entry: Entry) -> Any:
    """The content of what has no dimensions, as Python has it."""
    if entry.kind == "string":
        return entry.value
    stored = np.asarray(entry.value)[()]
    python = _PYTHON.get(stored.dtype.kind)
    return stored if python is None else python(stored)
