"""Strings, PRNG keys and metadata as Datarax 0.1.4 put them into trees of plain Orbax, which had no place for them.

* A string is a dictionary `{"__string__": True, "char_codes": [..]}`, a leaf for each character.
* A key is `{"__prng_key__": True, "key_data": [..]}`, lists of ints for its data.
* Metadata are beside the state in one dictionary, as `__metadata__`; a state that is none is in it as `__state__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.storage.entries import Empty, Entry, python_value

_STRING, _CODES = "__string__", "char_codes"
_KEY, _KEY_DATA = "__prng_key__", "key_data"
_METADATA, _STATE = "__metadata__", "__state__"
_IMPLS = {2: "threefry2x32", 4: "rbg"}
"""Which was the default where the data of a key has so many words."""

Keys = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Unmarked:
    """What was meant.

    Attributes:
        entries: Leaves of the state.
        empty: Its nodes without content.
        metadata: What was saved beside it; None if nothing was.
    """

    entries: list[Entry]
    empty: list[Empty]
    metadata: Any = None


def unmarked(entries: Sequence[Entry], empty: Sequence[Empty], read: Callable[[Entry], np.ndarray]) -> Unmarked:
    """Replaces markers by what they stand for. A tree without any comes back as it is.

    Args:
        entries: Leaves.
        empty: Nodes without content.
        read: Reads an array, of which metadata may have some.

    Raises:
        IntegrityError: A marker is not of the form that it should have.
    """
    names = {entry.names for entry in entries}
    marked = {one[:-1]: one[-1] for one in names if one and one[-1] in (_STRING, _KEY)}
    found = _in_order(_replaced(entries, marked), [one for one in empty if _owner(_names(one.keys), marked) is None])
    metadata = [one for one in found if one.keys[:1] == (("d", _METADATA),)]
    if not metadata:
        return _split(found)
    rest = [one for one in found if one.keys[:1] != (("d", _METADATA),)]
    if rest and all(one.keys[:1] == (("d", _STATE),) for one in rest):
        rest = [replace(one, keys=one.keys[1:]) for one in rest]
    split = _split(rest)
    return replace(split, metadata=_tree([replace(one, keys=one.keys[1:]) for one in metadata], read))


def int_keys(tree: Any) -> Any:
    """A tree in which names that are numbers are ints, as lists of flax modules have them. Orbax keeps names only."""
    if isinstance(tree, dict):
        made = {int(k) if isinstance(k, str) and k.isdigit() else k: int_keys(v) for k, v in tree.items()}
        return dict(sorted(made.items())) if all(isinstance(key, int) for key in made) else made
    if isinstance(tree, list | tuple):
        return type(tree)(map(int_keys, tree))
    return tree


def _names(keys: Keys) -> tuple[str, ...]:
    return tuple(str(key) for _, key in keys)


def _owner(names: tuple[str, ...], marked: dict[tuple[str, ...], str]) -> tuple[str, ...] | None:
    """The marked node that a leaf is part of."""
    return next((names[:end] for end in range(len(names)) if names[:end] in marked), None)


def _replaced(entries: Sequence[Entry], marked: dict[tuple[str, ...], str]) -> list[Entry]:
    """With one entry for each marked node, in the place of its first leaf."""
    parts: dict[tuple[str, ...], list[Entry]] = {}
    order: list[Entry | tuple[str, ...]] = []
    for entry in entries:
        owner = _owner(entry.names, marked)
        if owner is None:
            order.append(entry)
        elif owner in parts:
            parts[owner].append(entry)
        else:
            parts[owner] = [entry]
            order.append(owner)
    return [one if isinstance(one, Entry) else _meant(marked[one], one, parts[one]) for one in order]


def _meant(marker: str, names: tuple[str, ...], parts: Sequence[Entry]) -> Entry:
    depth = len(names)
    field = _CODES if marker == _STRING else _KEY_DATA
    numbers = {one.names[depth + 1 :]: one.value for one in parts if one.names[depth] == field}
    try:
        array = _nested(numbers)
        if marker == _STRING:
            return Entry(parts[0].keys[:depth], "string", value="".join(map(chr, array.reshape(-1))))
        array = array.astype(np.uint32)
        return Entry(parts[0].keys[:depth], "key", array.shape, array.dtype, _IMPLS[array.shape[-1]], content=array)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise IntegrityError(f"The leaves of {'.'.join(names)} are no {marker}: {error!r}.") from None


def _nested(numbers: dict[tuple[str, ...], Any]) -> np.ndarray:
    """The array of which these are the elements, by position."""
    if not numbers:
        return np.empty(0, np.int64)
    places = [tuple(map(int, place)) for place in numbers]
    shape = tuple(1 + max(side) for side in zip(*places, strict=True))
    if len(places) != int(np.prod(shape)):
        raise ValueError(f"{len(places)} elements of an array of shape {shape}")
    array = np.empty(shape, np.int64)
    for place, value in zip(places, numbers.values(), strict=True):
        array[place] = int(value)
    return array


def _in_order(entries: Sequence[Entry], empty: Sequence[Empty]) -> list[Entry | Empty]:
    """Leaves and empty nodes together; what was before an empty one is no more than that."""
    waiting, found = list(empty), []
    for number, entry in enumerate(entries):
        while waiting and waiting[0].before <= number:
            found.append(waiting.pop(0))
        found.append(entry)
    return [*found, *waiting]


def _split(found: Sequence[Entry | Empty]) -> Unmarked:
    entries: list[Entry] = []
    empty: list[Empty] = []
    for one in found:
        if isinstance(one, Entry):
            entries.append(one)
        else:
            empty.append(replace(one, before=len(entries)))
    return Unmarked(entries, empty)


def _tree(found: Sequence[Entry | Empty], read: Callable[[Entry], np.ndarray]) -> Any:
    """Metadata as the dictionaries and lists that they were."""
    root: dict[str, Any] = {}
    for one in found:
        node: Any = root
        for key in (None, *(key for _, key in one.keys[:-1])) if one.keys else ():
            node = node if key is None else node.setdefault(key, {})
        value = _EMPTY[one.kind]() if isinstance(one, Empty) else _content(one, read)
        if not one.keys:
            return value
        node[one.keys[-1][1]] = value
    return _lists(root, {one.keys[:end] for one in found for end in range(len(one.keys) + 1)}, ())


_EMPTY: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "tuple": tuple, "none": lambda: None}


def _content(entry: Entry, read: Callable[[Entry], np.ndarray]) -> Any:
    if entry.kind in ("string", "scalar"):
        return python_value(entry)
    return entry.content if entry.content is not None else read(entry)


def _lists(node: Any, prefixes: set[Keys], path: Keys) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    is_list = all((*path, ("s", key)) in prefixes for key in node)
    tag = "s" if is_list else "d"
    made = {key: _lists(child, prefixes, (*path, (tag, key))) for key, child in node.items()}
    return [made[i] for i in sorted(made)] if is_list else made
