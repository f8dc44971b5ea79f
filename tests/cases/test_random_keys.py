"""Random state survives: keys are keys again, and dropout goes on where it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ray_jax_ckpt as rjc
from cases.compare import abstract, assert_bits, assert_same
from cases.conftest import BOTH_TIERS
from ray_jax_ckpt.errors import TreeMismatchError

pytestmark = BOTH_TIERS


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_a_key_comes_back_as_a_key_of_its_implementation_and_draws_the_same(run, impl, shape):
    key = jax.random.key(42, impl=impl)
    state = {"k": key if shape == () else jax.random.split(key, shape)}
    found = run.trip(state, jax.eval_shape(lambda: state))
    assert_same(found, state)
    for a, b in zip(found["k"].reshape(-1), state["k"].reshape(-1), strict=True):
        assert_bits(jax.random.normal(a, (4,)), jax.random.normal(b, (4,)))


def dropout():
    return nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def test_a_dropout_layer_is_restored_into_what_eval_shape_of_its_constructor_gives(run):
    state = dropout()
    assert any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state))
    found = run.trip(state, nnx.eval_shape(dropout))
    assert_same(found, state)
    graph = nnx.graphdef(nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    drawn = [nnx.merge(graph, each)(jnp.ones(64)) for each in (found, dropout())]
    assert_bits(*drawn)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.inner(x)))


TX = optax.adam(1e-2)


def start(seed=0):
    graph, state = nnx.split(Net(nnx.Rngs(params=seed, dropout=seed + 1)))
    return graph, {"model": state, "opt": TX.init(nnx.filter_state(state, nnx.Param))}


@jax.numpy_dtype_promotion("standard")
def train_step(graph, state, x):
    model = nnx.merge(graph, state["model"])

    def loss_of(model):
        return jnp.mean((model(x) - 1.0) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    params, rest = nnx.split_state(nnx.state(model), nnx.Param, ...)
    updates, opt = TX.update(grads, state["opt"], params)
    return {"model": nnx.merge_state(optax.apply_updates(params, updates), rest), "opt": opt}, loss


def test_a_resumed_model_with_dropout_goes_on_bit_for_bit(run):
    graph, state = start()
    x = jnp.arange(12.0).reshape(3, 4) / 12
    losses = []
    for step in range(1, 7):
        state, loss = train_step(graph, state, x)
        losses.append(loss)
        if step == 3:
            handle = run.snapshot(state)
    template = nnx.eval_shape(lambda: start(seed=7)[1])
    resumed = rjc.restore(handle, template).state
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(resumed))
    again = []
    for _ in range(4, 7):
        resumed, loss = train_step(graph, resumed, x)
        again.append(loss)
    assert_bits(jnp.stack(again), jnp.stack(losses[3:]))
    assert_same(resumed, state)
    # The draws matter: other random state gives other losses.
    other, _ = train_step(graph, start()[1], x)
    assert not np.array_equal(jax.tree.leaves(other["opt"])[1], jax.tree.leaves(state["opt"])[1])


def test_a_template_with_one_more_random_stream_is_refused_by_its_path(run):
    handle = run.snapshot({"rngs": nnx.state(nnx.Rngs(params=0))})
    template = {"rngs": nnx.state(nnx.Rngs(params=0, dropout=1))}
    for partial in (False, True):
        with pytest.raises(
            TreeMismatchError, match=r"dropout.*key.*the template wants .*the snapshot has no such leaf"
        ):
            rjc.restore(handle, template, partial=partial)


def test_every_restore_counts_its_own_template(run):
    state = {"a": jnp.arange(4.0), "k": jax.random.key(1)}
    handle = run.snapshot(state)
    assert_same(rjc.restore(handle, abstract(state)).state, state)
    assert isinstance(rjc.restore(handle, state | {"a": np.zeros(4, np.float32)}).state["a"], np.ndarray)
    assert rjc.restore(handle, {"k": state["k"]}, partial=True).state.keys() == {"k"}
    with pytest.raises(TreeMismatchError, match=r"rbg PRNG key.*threefry2x32 PRNG key"):
        rjc.restore(handle, state | {"k": jax.random.key(1, impl="rbg")})
