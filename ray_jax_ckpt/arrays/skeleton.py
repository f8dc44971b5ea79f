"""What the paths of its leaves do not say of a tree, and a tree put together without a template.

Saved as JSON: names of classes are for messages only, nothing is imported or executed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from ray_jax_ckpt.arrays.tree import Flat, LeafSpec, checked_key_path, typed_key_path
from ray_jax_ckpt.errors import TreeMismatchError

# A saved index is not trusted: a list is only padded up to this many places beyond the leaves that it holds.
_MAX_LIST_GAPS = 10_000
_NUM_EXAMPLES = 3

_EMPTY: Mapping[str, type] = {"dict": dict, "list": list, "tuple": tuple, "none": type(None)}


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The inner nodes of a tree, as far as its leaves' key paths do not tell.

    Attributes:
        nodes: `[number of leaves before it, key path, "tuple"]` of every tuple, and the same with "dict", "list",
            "tuple" or "none" of every node that holds nothing.
        classes: `[name, number of nodes, first paths]` of every other class than dict, list, tuple and None.
    """

    nodes: list[list[Any]] = dataclasses.field(default_factory=list)
    classes: list[list[Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, flat: Flat) -> Skeleton:
        """Looks at every node of a flattened tree."""
        found, classes = cls(), {}
        _visit(jax.tree_util.tree_unflatten(flat.treedef, flat.leaves), (), 0, found.nodes, classes)
        found.classes.extend([name, number, first] for name, (number, first) in classes.items())
        return found

    @property
    def lost(self) -> list[str]:
        """What a tree that is put together without a template lacks: one line per class."""
        return [
            f"{name} at {', '.join(path or '(root)' for path in first)}"
            + (f" and {number - len(first)} more" if number > len(first) else "")
            for name, number, first in self.classes
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary that JSON can hold."""
        return {"nodes": self.nodes, "classes": self.classes}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Skeleton:
        """Reads what `to_json` wrote; nothing for what is missing.

        Raises:
            ValueError: it is not of that form.
        """
        try:
            nodes = [[int(n), checked_key_path(path), kind] for n, path, kind in json.get("nodes", ())]
            classes = [[str(n), int(count), [*map(str, first)]] for n, count, first in json.get("classes", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the description of a tree ({error!r}): {json!r:.200}") from error
        if not all(kind in _EMPTY for _, _, kind in nodes):
            raise ValueError(f"not the description of a tree: {json!r:.200}")
        return cls(nodes, classes)


def _visit(
    node: Any, path: tuple[Any, ...], before: int, nodes: list[list[Any]], classes: dict[str, tuple[int, list[str]]]
) -> int:
    """Notes a node and those below it; returns the number of leaves before it and in it."""
    # Not the registry's function for one level: in JAX 0.10 it gives all fields of a NamedTuple the first one's name.
    children, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(children) == 1 and children[0][0] == ():
        return before + 1
    kind = next((name for name, exact in _EMPTY.items() if type(node) is exact), None)
    if kind is None:
        number, first = classes.get(name := f"{type(node).__module__}.{type(node).__qualname__}", (0, []))
        classes[name] = (number + 1, [*first, keystr(path)][:_NUM_EXAMPLES])
    if not children or kind == "tuple":
        nodes.append([before, typed_key_path(path), kind or "dict"])
    for key, child in children:
        before = _visit(child, (*path, *key), before, nodes, classes)
    return before


class _Node:
    """An inner node of a tree that is put together from key paths."""

    def __init__(self) -> None:
        self.children: dict[Hashable, Any] = {}
        self.tags: set[str] = set()
        self.is_tuple = False


def rebuild(specs: Sequence[LeafSpec], leaves: Sequence[Any], skeleton: Skeleton) -> Any:
    """Puts a tree together without a template.

    Dictionaries keep their str and int keys, lists and tuples are such, and so is what is empty. Nodes of other classes
    become dictionaries by attribute name, or lists if they have no names. A state that is one leaf gives that leaf.

    Raises:
        TreeMismatchError: two leaves claim the same place.
    """
    nodes = list(skeleton.nodes)
    root: Any = None
    for position, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
        while nodes and nodes[0][0] <= position:
            root = _add_node(root, *nodes.pop(0)[1:])
        root = _insert(root, spec.key_path, leaf)
    for _, key_path, kind in nodes:
        root = _add_node(root, key_path, kind)
    if root is None:
        return {}
    return _collapse(root) if isinstance(root, _Node) else root[0]


def _add_node(root: Any, key_path: list[list[Any]], kind: str) -> Any:
    if kind != "tuple":
        return _insert(root, key_path, _EMPTY[kind]())
    root = root if isinstance(root, _Node) else _Node()
    node = _descend(root, key_path)
    node.is_tuple = True
    return root


def _insert(root: Any, key_path: list[list[Any]], leaf: Any) -> Any:
    """Puts a leaf in its place, and returns the root: a node, or what is not one in a list of its own."""
    if not key_path:
        if root is not None:
            raise _same_place(key_path)
        return [leaf]
    if root is not None and not isinstance(root, _Node):
        raise _same_place(key_path)
    root = root or _Node()
    node = _descend(root, key_path[:-1])
    tag, key = key_path[-1]
    if key in node.children:
        raise _same_place(key_path)
    node.tags.add(tag)
    node.children[key] = leaf
    return root


def _descend(node: _Node, key_path: list[list[Any]]) -> _Node:
    for tag, key in key_path:
        node.tags.add(tag)
        child = node.children.setdefault(key, _Node())
        if not isinstance(child, _Node):
            raise _same_place(key_path)
        node = child
    return node


def _same_place(key_path: list[list[Any]]) -> TreeMismatchError:
    return TreeMismatchError(f"the saved tree is damaged: {key_path} takes the place of another node or leaf.")


def _collapse(node: _Node) -> Any:
    children = {key: _collapse(c) if isinstance(c, _Node) else c for key, c in node.children.items()}
    if node.is_tuple or (node.tags and node.tags <= {"s", "f"}):
        whole = _as_list(children)
        return tuple(whole) if node.is_tuple and isinstance(whole, list) else whole
    return children


def _as_list(children: dict[Any, Any]) -> Any:
    if not all(isinstance(key, int) for key in children):
        raise TreeMismatchError(f"the saved tree is damaged: a list or tuple has the keys {list(children)[:5]}.")
    length = 1 + max(children, default=-1)
    if min(children, default=0) < 0 or length > len(children) + _MAX_LIST_GAPS:
        return dict(sorted(children.items()))
    return [children.get(i) for i in range(length)]
