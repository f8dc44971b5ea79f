"""The structure of a state: its names, its order, its types, and what is empty in it."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ray_jax_ckpt as rjc
from cases.compare import abstract, assert_same
from cases.conftest import BOTH_TIERS
from ray_jax_ckpt.errors import NotSupportedError, TreeMismatchError, UnsupportedLeafError

pytestmark = BOTH_TIERS

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))

NAMES = [
    "test/test",
    "a.b",
    "~home",
    "50%",
    "%2F",
    "two words",
    "ключ",
    "λ",
    "",
    ".hidden",
    "a']['b",
    'q"uote',
]
NOT_ON_STORAGE = ["..", "\n"]


# --- names


def test_any_name_is_a_key_and_no_two_are_the_same(run, tier):
    names = NAMES + NOT_ON_STORAGE * (tier == "memory")
    state = {name: jnp.full(3, number) for number, name in enumerate(names)}
    assert_same(run.trip(state, abstract(state)), state)
    assert {k: v.tolist() for k, v in run.trip(state).items()} == {k: v.tolist() for k, v in state.items()}


@pytest.mark.parametrize("shape", [(3,), (2,)], ids=["same shape", "other shape"])
@pytest.mark.parametrize("separator", [".", "/", "']['"])
def test_a_separator_in_a_name_is_not_taken_for_a_level(run, tier, separator, shape, tmp_path, caplog):
    state = {f"a{separator}b": jnp.ones(3), "a": {"b": jnp.zeros(shape)}}
    if (tier, separator) == ("storage", "."):
        # Orbax has one place for both: refused before anything is written, by both paths.
        with pytest.raises(NotSupportedError, match="cannot be written as a checkpoint"):
            run.snapshot(state)
        assert "['a.b'] cannot be written to storage: ['a']['b'] would have the same directory" in caplog.text
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]
        return
    assert_same(run.trip(state, abstract(state)), state)
    assert_same(jax.tree.map(jnp.asarray, run.trip(state)), state)


# --- order


def test_lists_of_layers_come_back_in_order_and_with_their_index(run):
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(number)) for number in range(11)])
    state = nnx.state(model)
    pure = nnx.to_pure_dict(state)
    assert list(pure) == list(range(11))
    found = run.trip(pure)
    assert list(found) == list(range(11))
    assert all(type(key) is int for key in found)
    for number in range(11):
        np.testing.assert_array_equal(found[number]["kernel"], model[number].kernel[...])
    other = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(99)) for _ in range(11)])
    empty = nnx.state(other)
    nnx.replace_by_pure_dict(empty, jax.tree.map(jnp.asarray, found))
    assert_same(empty, state)
    assert_same(run.trip(pure, abstract(pure)), pure)
    assert_same(run.trip(state, nnx.eval_shape(lambda: nnx.state(other))), state)


def test_a_long_list_is_ordered_by_number_not_by_text(run):
    state = [jnp.float32(number) for number in range(12)]
    assert [float(x) for x in run.trip(state)] == [*range(12)]
    assert_same(run.trip(state, abstract(state)), state)


def test_keys_of_numbers_and_of_text_stay_apart(run):
    state = {"ints": {10: 1, 9: 2, -1: 3}, "texts": {"10": 4, "9": 5}}
    found = run.trip(state)
    assert found == state
    assert list(found["ints"]) == [-1, 9, 10]


# --- types


def optimizer():
    mask = {"w": True, "frozen": False}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(1e-3), mask),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    )


PARAMS = {"w": jnp.ones((4, 2)), "frozen": jnp.zeros(3)}


def test_an_optimizer_s_state_keeps_its_types_and_can_be_a_branch(run):
    state = optimizer().init(PARAMS)
    found = run.trip(state, jax.eval_shape(lambda: optimizer().init(PARAMS)))
    assert_same(found, state)
    kinds = str(jax.tree.structure(found))
    assert all(kind in kinds for kind in ("EmptyState", "MaskedNode", "ScaleByAdamState"))
    fresh = jax.lax.cond(jnp.bool_(True), lambda: found, lambda: optimizer().init(PARAMS))
    assert_same(fresh, state)


def test_without_a_template_it_is_said_what_the_types_were(run, caplog):
    caplog.set_level("WARNING")
    state = {"opt": optimizer().init(PARAMS), "n": 3}
    found = run.trip(state)
    assert found["n"] == 3
    for part in ("without a template", "ScaleByAdamState", "['opt']", "MaskedNode", "EmptyState", "abstract_state"):
        assert part in caplog.text


def test_a_plain_state_without_a_template_loses_nothing_and_nothing_is_said(run, caplog):
    caplog.set_level("WARNING")
    state = {"a": [1, (2, "x")], "b": {"c": None}, "d": {3: (), 4: []}, "e": {}}
    assert run.trip(state) == state
    assert not caplog.records


class PD(dict):
    """A dictionary of its own class."""


jax.tree_util.register_pytree_with_keys(
    PD,
    lambda d: ([(jax.tree_util.DictKey(k), d[k]) for k in sorted(d)], tuple(sorted(d))),
    lambda keys, children: PD(zip(keys, children, strict=True)),
)


class Empty(NamedTuple):
    """No fields."""


def test_what_is_empty_stays_empty_and_of_its_type(run):
    state = {"a": PD(), "b": jnp.ones(3), "c": PD(x=PD(), y=1), "d": {}, "e": [], "f": (), "g": None, "h": Empty()}
    found = run.trip(state, abstract(state))
    assert_same(found, state)
    assert type(found["a"]) is PD
    assert type(found["c"]["x"]) is PD
    assert type(found["h"]) is Empty
    found = run.trip(state)
    assert {k: found[k] for k in "acdefgh"} == {
        "a": {}, "c": {"x": {}, "y": 1}, "d": {}, "e": [], "f": (), "g": None, "h": {}
    }  # fmt: skip


@pytest.mark.parametrize("state", [{}, [], (), None, PD(), Empty()], ids=repr)
def test_a_state_of_nothing(run, state):
    assert_same(run.trip(state, state), state)


@pytest.mark.parametrize(
    "state", [jnp.arange(3), jax.random.key(3), np.arange(3), 5, "text"], ids=lambda x: type(x).__name__
)
def test_a_state_that_is_one_leaf(run, state):
    assert_same(run.trip(state, abstract(state)), state)


# --- arrays without elements


def test_arrays_without_elements_keep_shape_dtype_and_sharding(run):
    on_mesh = {
        "rows": jax.device_put(jnp.zeros((4, 0), jnp.bfloat16), NamedSharding(MESH, P("fsdp"))),
        "none": jax.device_put(jnp.zeros((0, 4)), NamedSharding(MESH, P(("replica", "fsdp")))),
        "everywhere": jax.device_put(jnp.zeros((0,), jnp.int8), NamedSharding(MESH, P())),
    }
    params = {
        "a": jnp.arange(3.0),
        "z": jnp.zeros((0,)),
        "y": jnp.zeros((4, 0)),
        "mesh": on_mesh,
        "n": np.zeros((0, 2), "U5"),
    }
    state = {
        "params": params,
        "opt": optax.adamw(1e-3).init({"a": params["a"], "z": params["z"], "lora": jnp.zeros((8, 0))}),
    }
    assert_same(run.trip(state, abstract(state)), state)
    bare = run.trip(state)
    assert bare["params"]["y"].shape == (4, 0)
    assert bare["params"]["mesh"]["rows"].dtype == jnp.bfloat16


# --- models that carry functions


def test_the_arrays_of_a_model_with_functions_among_its_leaves(run):
    model = eqx.nn.MLP(3, 2, 4, depth=1, use_final_bias=False, key=jax.random.key(0))
    assert any(callable(leaf) for leaf in jax.tree.leaves(model))
    assert model.layers[-1].bias is None
    arrays, static = eqx.partition(model, eqx.is_array)
    opt = optax.adam(1e-3).init(arrays)
    found = run.trip({"model": arrays, "opt": opt}, abstract({"model": arrays, "opt": opt}))
    assert_same(found, {"model": arrays, "opt": opt})
    whole = eqx.combine(found["model"], static)
    assert jax.tree.structure(whole) == jax.tree.structure(model)
    np.testing.assert_array_equal(whole(jnp.ones(3)), model(jnp.ones(3)))


def test_functions_of_the_template_are_taken_from_it(run):
    model = eqx.nn.MLP(3, 2, 4, depth=1, key=jax.random.key(0))
    handle = run.snapshot({"model": eqx.filter(model, eqx.is_array), "n": 1})
    other = eqx.nn.MLP(3, 2, 4, depth=1, key=jax.random.key(1))
    found = rjc.restore(handle, {"model": other, "n": 0}).state["model"]
    assert jax.tree.structure(found) == jax.tree.structure(other)
    assert found.activation is other.activation
    np.testing.assert_array_equal(found(jnp.ones(3)), model(jnp.ones(3)))
    # In the place of an array a function is a mismatch like any other.
    with pytest.raises(TreeMismatchError, match=r"\['n'\]: .*builtin.*the snapshot has a value of type int"):
        rjc.restore(handle, {"model": other, "n": print})


def test_a_bare_function_is_refused_with_what_to_do(run):
    model = eqx.nn.MLP(3, 2, 4, depth=1, key=jax.random.key(0))
    with pytest.raises(UnsupportedLeafError, match=r"\['model'\]\.activation.*functions.*eqx\.partition"):
        run.snapshot({"model": model})
