from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from gpt.model import AXIS, GPTConfig, Training, make_mesh, shard
from jax.sharding import PartitionSpec as P

TINY = GPTConfig(length=16, width=32, num_layers=1, num_heads=2, batch_size=8, num_warmup_steps=2, num_steps=10)


@pytest.fixture(autouse=True)
def _usual_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # optax's AdamW multiplies floats by integer counts
        yield


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(TINY, make_mesh())


def batch(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    tokens = np.random.default_rng(seed).integers(0, TINY.vocabulary, (TINY.batch_size, TINY.length + 1))
    return tokens.astype(np.int32)


def run(training: Training, state: Any, steps: range) -> tuple[Any, list[str]]:
    losses = []
    for step in steps:
        state, loss = training.step(state, batch(step))
        losses.append(float(loss).hex())
    return state, losses


def is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_numpy(state: Any) -> list[np.ndarray[Any, Any]]:
    return [np.array(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(to_numpy(a), to_numpy(b), strict=True):
        np.testing.assert_array_equal(x, y)


def copy(state: Any) -> Any:
    return jax.tree.map(lambda x: x.copy(), state)


def test_abstract_state_describes_the_state(training: Training) -> None:
    state, abstract = training.init_state(), training.abstract_state()
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert isinstance(expected, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert leaf.sharding == expected.sharding


def test_steps_are_deterministic_and_can_go_on_from_a_copy(training: Training) -> None:
    whole, losses = run(training, training.init_state(), range(6))
    half, first = run(training, training.init_state(), range(3))
    kept = copy(half)
    run(training, half, range(3, 6))  # donates, and so destroys, what `kept` was copied from
    rest, second = run(training, kept, range(3, 6))
    assert first + second == losses
    assert_same(whole, rest)


def test_dropout_draws_from_the_state(training: Training) -> None:
    state = training.init_state()
    other_keys = jax.tree.map(lambda x: jax.random.fold_in(x, 1) if is_key(x) else x.copy(), state)
    assert run(training, state, range(1))[1] != run(training, other_keys, range(1))[1]


def test_step_donates_its_state(training: Training) -> None:
    state = training.init_state()
    training.step(state, batch(0))
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_matrices_are_split_and_the_rest_is_everywhere() -> None:
    mesh = make_mesh()
    size = mesh.size

    def spec(*shape: int) -> P:
        return shard(jax.ShapeDtypeStruct(shape, np.float32), mesh).spec

    assert spec(4 * size, 8 * size) == P(None, AXIS)
    assert spec(8 * size, 4 * size) == P(AXIS, None)
    assert spec(8 * size) == P(None)
    assert spec() == P()
