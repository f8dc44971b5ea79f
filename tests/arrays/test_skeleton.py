"""Trees put together without a template."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.skeleton import Skeleton, rebuild
from ray_jax_ckpt.errors import TreeMismatchError


class Pair(NamedTuple):
    left: Any
    right: Any


class Nothing(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@jax.tree_util.register_pytree_node_class
class Opaque:
    """A node without key paths."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def through_json(x):
    return type(x).from_json(json.loads(json.dumps(x.to_json())))


def rebuilt(state):
    flat = tree.flatten(state)
    specs = [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
    skeleton = through_json(Skeleton.of(flat))
    return rebuild([through_json(spec) for spec in specs], flat.leaves, skeleton), skeleton.lost


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, [2, 3], {"b": "x"}], "c": {7: 1, -2: 2}, "d": {str(i): i for i in range(12)}},
        {"a": (), "b": [], "c": {}, "d": None, "e": [(), None, {}], "f": (1, (2, None), [])},
        [*range(12)],
        {0: "a", 2: "b"},
        (1, [2, (3,)]),
        5,
        {},
        [],
        (),
        None,
    ],
    ids=repr,
)
def test_plain_trees_come_back_exactly(state):
    back, lost = rebuilt(state)
    assert back == state
    assert repr(jax.tree.structure(back)) == repr(jax.tree.structure(state))
    assert type(back) is type(state)
    assert lost == []


def test_other_classes_come_back_as_plain_nodes_and_are_named():
    state = {
        "p": Pair(1, Nothing()),
        "o": [Opaque(3, 4), Opaque()],
        "d": Point(7, {}),
        "c": collections.OrderedDict(b=1, a=2),
    }
    back, lost = rebuilt(state | {"more": [Pair(i, i) for i in range(5)]})
    del back["more"]
    assert back == {"p": {"left": 1, "right": {}}, "o": [[3, 4], {}], "d": {"x": 7, "y": {}}, "c": {"b": 1, "a": 2}}
    text = "\n".join(lost)
    for part in (
        "test_skeleton.Pair at ['more'][0], ['more'][1], ['more'][2] and 3 more",
        "test_skeleton.Nothing at ['p'].right",
        "test_skeleton.Opaque at ['o'][0], ['o'][1]",
        "test_skeleton.Point at ['d']",
        "collections.OrderedDict at ['c']",
    ):
        assert part in text
    assert "test_skeleton.Pair at (root)" in rebuilt(Pair(1, 2))[1]


def test_array_leaves_are_left_alone():
    back, _ = rebuilt({"a": (jnp.ones(3), None)})
    assert back["a"][0].shape == (3,)
    assert back["a"][1] is None


def spec_at(*key_path):
    return tree.LeafSpec(str(key_path), "value", (), "int", False, None, [list(key) for key in key_path])


def test_saved_nonsense_is_bounded_or_refused():
    assert rebuild([spec_at(("s", 10**12))], [1], Skeleton()) == {10**12: 1}
    assert rebuild([spec_at(("s", 2))], [1], Skeleton()) == [None, None, 1]
    for second in ((("d", "a"),), (("d", "a"), ("d", "b")), ()):
        with pytest.raises(TreeMismatchError, match="damaged"):
            rebuild([spec_at(("d", "a")), spec_at(*second)], [1, 2], Skeleton())
    with pytest.raises(TreeMismatchError, match="damaged"):
        rebuild([spec_at(("d", "a"), ("d", "b")), spec_at(("d", "a"))], [1, 2], Skeleton())
    for node in ([[0, [["d", "a"]], "none"]], [[1, [["d", "a"]], "tuple"]], [[9, [], "none"]]):
        with pytest.raises(TreeMismatchError, match="damaged"):
            rebuild([spec_at(("d", "a"))], [1], Skeleton(node))


@pytest.mark.parametrize(
    "raw", [{"nodes": [[0, [["d", 1]], "none"]]}, {"nodes": [[0, [], "pickle"]]}, {"nodes": 1}, {"classes": [1]}]
)
def test_damaged_descriptions_are_refused(raw):
    with pytest.raises(ValueError, match="description of a tree"):
        Skeleton.from_json(raw)


def test_a_tuple_with_names_for_keys_is_damaged():
    specs = [tree.LeafSpec("['a']", "value", (), "int", False, None, [["d", "a"]])]
    with pytest.raises(TreeMismatchError, match=r"damaged: a list or tuple has the keys \['a'\]"):
        rebuild(specs, [1], Skeleton(nodes=[[0, [], "tuple"]]))
