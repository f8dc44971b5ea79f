from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.errors import UnsupportedLeafError


class Pair(NamedTuple):
    left: Any
    right: Any


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


def specs_of(state):
    flat = tree.flatten(state)
    return flat, [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]


def mismatch(saved, template, *, partial=False, cast=False):
    return tree.mismatch(specs_of(saved)[1], tree.flatten(template), partial=partial, cast=cast)


# --- flatten


def test_flatten_keeps_nodes_of_every_kind():
    state = {"a": Pair(1, None), "b": [Point(2, ()), {}], 3: Opaque(4, 5)}
    with pytest.raises(UnsupportedLeafError, match=r"cannot be flattened.*keys of one dictionary"):
        tree.flatten(state)  # jax itself cannot order str and int keys
    flat = tree.flatten({"a": Pair(1, None), "b": [Point(2, ()), {}], "c": Opaque(4, 5)})
    assert flat.paths == ("['a'].left", "['b'][0].x", "['c'][<flat index 0>]", "['c'][<flat index 1>]")
    assert flat.leaves == [1, 2, 4, 5]
    back = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
    assert isinstance(back["a"], Pair)
    assert back["a"].right is None
    assert back["b"][1] == {}


def test_flatten_of_a_single_leaf_and_of_nothing():
    assert tree.flatten(5).paths == ("",)
    assert tree.flatten({}).paths == ()
    assert tree.flatten(None).leaves == []


def test_flax_and_optax_states():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = {"model": nnx.state(model), "opt": optax.adamw(1e-3).init({"w": jnp.ones(2)})}
    flat, specs = specs_of(state)
    assert "['opt'][0].mu['w']" in flat.paths
    assert all(spec.kind == "array" for spec in specs)
    back = jax.tree_util.tree_unflatten(flat.treedef, flat.leaves)
    assert isinstance(back["model"], nnx.State)
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_abstract_leaves_can_be_flattened():
    flat = tree.flatten(jax.eval_shape(lambda: {"a": jnp.ones(3), "k": jax.random.key(0)}))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat.leaves)


# --- describe


@pytest.mark.parametrize(
    ("leaf", "kind", "dtype", "shape"),
    [
        (lambda: jnp.ones((2, 3), jnp.bfloat16), "array", "bfloat16", (2, 3)),
        (lambda: jnp.zeros((0, 4), jnp.int4), "array", "int4", (0, 4)),
        (lambda: jnp.ones(2, jnp.float8_e4m3fn), "array", "float8_e4m3fn", (2,)),
        (lambda: np.ones((2, 1), np.int16), "numpy", "int16", (2, 1)),
        (lambda: np.array(3.0), "numpy", "float64", ()),
        (lambda: np.ones(2, ">f4"), "numpy", ">f4", (2,)),
        (lambda: np.array(["ab"]), "numpy", "<U2", (1,)),
        (lambda: np.float32(1), "value", "numpy.float32", ()),
        (lambda: jnp.bfloat16(1).item(), "value", "float", ()),
        (lambda: True, "value", "bool", ()),
        (lambda: 2**70, "value", "int", ()),
        (lambda: "name", "value", "str", ()),
        (lambda: b"\x00", "value", "bytes", ()),
        (lambda: 1j, "value", "complex", ()),
    ],
)
def test_describe(leaf, kind, dtype, shape):
    (spec,) = specs_of({"x": leaf()})[1]
    assert (spec.path, spec.kind, spec.dtype, spec.shape) == ("['x']", kind, dtype, shape)
    assert tree.LeafSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_describe_keys(impl):
    (spec,) = specs_of([jax.random.split(jax.random.key(0, impl=impl), (2, 3))])[1]
    assert (spec.kind, spec.shape, spec.dtype, spec.key_impl) == ("key", (2, 3), "uint32", impl)


def test_raw_key_data_is_an_ordinary_array():
    (spec,) = specs_of([jax.random.PRNGKey(0)])[1]
    assert (spec.kind, spec.dtype, spec.key_impl) == ("array", "uint32", None)


def test_weak_type_is_seen():
    weak, strong = specs_of([jnp.asarray(1.0), jnp.ones(2)])[1]
    assert (weak.weak_type, strong.weak_type) == (True, False)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("leaf", "remedy"),
    [
        (lambda x: x, "nnx.split"),
        (iter([1]), "data="),
        (np.array([None]), "numeric"),
        (np.zeros(2, [("a", "i4")]), "each field"),
        (np.ma.masked_array([1]), "np.asarray"),
        ({1, 2}, r"sorted\("),
        (object(), "register its class"),
        (Colour.RED, "plain type"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "concrete state"),
        (np.zeros(1, jax.dtypes.float0), "each field"),
    ],
)
def test_unsupported_leaves_are_refused_by_path_with_a_remedy(leaf, remedy):
    with pytest.raises(UnsupportedLeafError, match=rf"\['opt'\]\[0\].*{remedy}"):
        specs_of({"opt": [leaf]})


def test_tracers_are_refused():
    with pytest.raises(UnsupportedLeafError, match=r"\['x'\].*tracer"):
        jax.jit(lambda x: specs_of({"x": x}) and x)(jnp.ones(2))


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "pickle"},
        {"shape": [-1]},
        {"shape": ["1"]},
        {"shape": 3},
        {"key_path": [["d"]]},
        {"key_path": 1},
        {"key_path": [["s", "a"]]},
        {"key_path": [["d", []]]},
        {"key_path": [["x", 1]]},
    ],
)
def test_damaged_descriptions_are_refused(damage):
    (spec,) = specs_of({"x": jnp.ones(2)})[1]
    with pytest.raises(ValueError, match="description"):
        tree.LeafSpec.from_json(spec.to_json() | damage)
    with pytest.raises(ValueError, match="description"):
        tree.LeafSpec.from_json({"path": "x"})


def test_descriptions_of_newer_versions_may_have_more_fields():
    (spec,) = specs_of({"x": jnp.ones(2)})[1]
    assert tree.LeafSpec.from_json(spec.to_json() | {"colour": "red"}) == spec


# --- keys and weak types


def test_keys_and_their_data(mesh):
    keys = jax.device_put(jax.random.split(jax.random.key(7), 4), NamedSharding(mesh, P("fsdp")))
    assert tree.is_key(keys)
    assert tree.is_key(jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    assert not any(map(tree.is_key, [jnp.ones(2), np.ones(2), 3, None, "x"]))
    data = tree.key_data(keys)
    assert data.shape == (4, 2)
    back = tree.wrap_key(data, "threefry2x32")
    assert back.dtype == keys.dtype
    assert back.sharding.is_equivalent_to(keys.sharding, 1)


@pytest.mark.parametrize("where", ["uncommitted", "single", "sharded", "replicated", "pinned"])
def test_weak_types_can_be_set_anywhere(mesh, where):
    shardings = {
        "single": SingleDeviceSharding(jax.devices()[1]),
        "sharded": NamedSharding(mesh, P(("replica", "fsdp"))),
        "replicated": NamedSharding(mesh, P()),
        "pinned": NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host"),
    }
    x = jnp.arange(8.0)
    x = jax.device_put(x, shardings[where]) if where in shardings else x
    before = np.asarray(x)
    for weak in (True, False):
        x = tree.with_weak_type(x, weak)
        assert x.weak_type is weak
        np.testing.assert_array_equal(np.asarray(x), before)
        assert x.committed is (where in shardings)
        if where in shardings:
            assert x.sharding == shardings[where]
    assert tree.with_weak_type(x, False) is x


def test_a_weakly_typed_array_promotes_and_can_be_donated():
    x = tree.with_weak_type(jnp.ones(4), True)
    assert (x + jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16
    jax.jit(lambda a: a * 2.0, donate_argnums=0)(x)
    assert x.is_deleted()


def test_keys_have_no_weak_type():
    key = jax.random.key(0)
    assert tree.with_weak_type(key, True) is key


# --- mismatch

STATE = {"w": jnp.ones((2, 3)), "k": jax.random.key(0), "n": np.ones(2, np.float32), "step": 3, "name": "gpt"}


def test_a_state_fits_itself_and_its_abstract_form():
    assert mismatch(STATE, STATE) is None
    abstract = STATE | {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "k": jax.ShapeDtypeStruct((), STATE["k"].dtype)}
    assert mismatch(STATE, abstract) is None


def test_numpy_and_jax_arrays_stand_in_for_each_other():
    assert mismatch({"a": np.ones(2, np.float32)}, {"a": jnp.ones(2)}) is None
    assert mismatch({"a": jnp.ones(2)}, {"a": np.ones(2, np.float32)}) is None


def test_another_value_of_the_same_type_fits():
    saved = {"a": 3, "b": "x", "c": np.str_("x")}
    assert mismatch(saved, {"a": 4, "b": "long", "c": np.str_("long")}) is None


@pytest.mark.parametrize(
    ("saved", "wanted", "both_sides"),
    [
        (jnp.ones(2), jnp.ones(3), ["float32[2]", "float32[3]"]),
        (jnp.ones(2), jnp.ones(2, jnp.bfloat16), ["float32[2]", "bfloat16[2]", "cast=True"]),
        (jnp.ones(2), 3, ["float32[2]", "type int"]),
        (3, 3.0, ["type int", "type float"]),
        (3, True, ["type int", "type bool"]),
        (3, np.int64(3), ["type int", "numpy.int64"]),
        (jax.random.key(0), jnp.ones(2, jnp.uint32), ["threefry2x32", "uint32[2]"]),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), ["threefry2x32", "rbg"]),
        (jax.random.key(0), jax.random.split(jax.random.key(0)), ["[]", "[2]"]),
    ],
)
def test_leaves_that_differ_are_named_with_both_sides(saved, wanted, both_sides):
    text = mismatch({"opt": [saved]}, {"opt": [wanted]})
    assert text is not None
    assert text.startswith("['opt'][0]: ")
    for part in both_sides:
        assert part in text


def test_cast_allows_another_dtype_of_arrays_only():
    assert mismatch({"a": jnp.ones(2)}, {"a": jnp.ones(2, jnp.bfloat16)}, cast=True) is None
    assert mismatch({"a": np.ones(2)}, {"a": jnp.ones(2)}, cast=True) is None
    assert mismatch({"a": 3}, {"a": 3.0}, cast=True) is not None
    assert mismatch({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, cast=True) is not None
    assert mismatch({"a": jax.random.key(0)}, {"a": jax.random.key(0, impl="rbg")}, cast=True) is not None


def test_partial_allows_the_template_to_lack_leaves_but_not_to_want_more():
    text = mismatch({"a": 1, "b": 2}, {"a": 1})
    assert text is not None
    assert "['b']" in text
    assert "partial=True" in text
    assert mismatch({"a": 1, "b": 2}, {"a": 1}, partial=True) is None
    wants_more = mismatch({"a": 1}, {"a": 1, "b": 2}, partial=True)
    assert wants_more is not None
    assert wants_more.startswith("['b']")


def test_at_most_ten_lines():
    text = mismatch({str(i): i for i in range(100)}, {})
    assert text is not None
    assert len(text.splitlines()) == 10
    assert text.endswith("and 91 more leaves that do not fit")
    exact = mismatch({str(i): i for i in range(10)}, {})
    assert exact is not None
    assert "more leaves" not in exact


def test_a_template_with_an_unsupported_leaf_is_refused():
    with pytest.raises(UnsupportedLeafError, match=r"\['a'\]"):
        mismatch({"a": 1}, {"a": object()})
