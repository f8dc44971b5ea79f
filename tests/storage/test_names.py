"""Where leaves lie: what Orbax cannot keep apart, or would put outside of the checkpoint, is refused before writing."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.errors import UnsupportedLeafError
from ray_jax_ckpt.storage.names import leaf_names
from ray_jax_ckpt.storage.orbax_types import orbax_types, place_strings

X = np.ones(2)


def specs(state):
    flat = tree.flatten(state)
    return [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]


def test_keys_are_joined_with_dots_as_orbax_does():
    assert leaf_names(specs({"a": [X, {"b": X}], "c d": (X,)})) == ["a.0", "a.1.b", "c d.0"]
    assert leaf_names(specs(X)) == [""]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a.b": X, "a": {"b": X}}, r"\['a.b'\] .*\['a'\]\['b'\] would have the same directory 'a.b'"),
        ({"a": X, "a/": X}, "would have the same directory 'a'"),
        ({"": {"": X}}, r"has empty names, \. or \.\."),
        ({"..": X}, "has empty names"),
        ({"a/../../b": X}, "has empty names"),
        ({"/etc/passwd": X}, "has empty names"),
        ({"a//b": X}, "has empty names"),
        ({"a\nb": X}, "control characters"),
        ({"a\\b": X, "a/b": X}, "takes a backslash in a name for a slash"),
        ({"\ud800": X}, "surrogates not allowed"),
        ({"x" * 300: X}, "too long"),
        ({"_METADATA": X}, "a file or directory '_METADATA' of its own"),
        ({"array_metadatas": X}, "'array_metadatas' of its own"),
        ({"ray_jax_ckpt": X}, "'ray_jax_ckpt' of its own"),
        ({"d": X}, "'d' of its own"),
        ({"ocdbt.process_0": X}, "of its own"),
        ({"a": X, "a/c": X}, r"\['a/c'\] .* would be among the files of \['a'\]"),
        ({"a": X, "a/c/0": X}, "among the files of"),
        ({"a": X, "a/zarr.json": X}, "among the files of"),
        ({"": X, "c": X}, "among the files of"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused_with_the_remedy(state, said):
    with pytest.raises(UnsupportedLeafError, match=said) as caught:
        leaf_names(specs(state))
    assert "Rename a key" in str(caught.value)


@pytest.mark.parametrize(
    "state", [{"a": X, "a/b": X, "a/cc": X}, {"a.c": X, "a": {"b": X}}, {"c": X}, {"zarr.json": X}]
)
def test_what_only_looks_alike_is_kept_apart(state):
    names = leaf_names(specs(state))
    assert len(set(names)) == len(jax.tree.leaves(state))


def test_strings_lie_where_a_json_pointer_finds_them():
    found, lost = place_strings({0: ("a/b", "x"), 1: ("a/c", "y"), 2: ("~1~0", "z"), 3: ("", "e")})
    assert (found, lost) == ({"a": {"b": "x", "c": "y"}, "/~": "z", "": "e"}, set())


@pytest.mark.parametrize(
    "strings", [{0: ("k", "x"), 1: ("k/b", "y")}, {0: ("k/b", "y"), 1: ("k", "x")}, {0: ("a", ""), 1: ("~x", "y")}]
)
def test_a_string_that_no_pointer_finds_is_known(strings):
    assert place_strings(strings)[1] == {1}


def test_what_orbax_has_no_type_for_is_none_to_it():
    state = [
        1,
        2**63,
        2**64,
        -(2**63) - 1,
        0.5,
        True,
        1j,
        b"x",
        "x",
        "\udc00",
        np.float32(1),
        np.str_("y"),
        np.array("z"),
    ]
    flat = tree.flatten(state)
    values = {i: tree.encode_value(x) for i, x in enumerate(flat.leaves) if not isinstance(x, np.ndarray)}
    number, lost = "scalar", "None"
    assert orbax_types(specs(state), values) == (
        [number, number, lost, lost, number, "np.ndarray", lost, lost, "string", lost, number, "string", lost]
    )
