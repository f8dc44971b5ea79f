"""What assert_identical tells apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays.tree import with_weak_type
from ray_jax_ckpt.testing import assert_identical

MESH = Mesh(np.array(jax.devices()[:4]), ("x",))
ROWS = NamedSharding(MESH, P("x"))
NAN = np.float32("nan")


def test_equal_states_pass():
    def state():
        return {
            "w": jax.device_put(jnp.arange(8.0), ROWS),
            "key": jax.random.key(1),
            "nan": np.array([NAN, 0.0, -0.0]),
            "half": jnp.ones((), jnp.bfloat16),
            "empty": jnp.zeros((0, 3)),
            "plain": (1, 0.5, float("nan"), "a", None),
        }

    assert_identical(state(), state())


@pytest.mark.parametrize(
    ("restored", "expected", "why"),
    [
        ({"a": 1}, {"b": 1}, "trees differ"),
        ((1,), [1], "trees differ"),
        (jnp.arange(3.0), jnp.arange(3), "the state: dtype: restored float32, expected int32"),
        (jnp.zeros((2, 3)), jnp.zeros((3, 2)), "shape: restored"),
        (with_weak_type(jnp.ones(2), True), jnp.ones(2), "weak type: restored True, expected False"),
        (jax.random.key(1, impl="rbg"), jax.random.key(1), "dtype"),
        (jax.random.key(1), jax.random.key(2), r"1 of 2 elements, first at \[1\]: restored .*1.*, expected .*2"),
        (jax.device_put(jnp.arange(8.0), ROWS), jnp.arange(8.0), "sharding"),
        (jnp.array([1.0, -0.0]), jnp.array([1.0, 0.0]), r"1 of 2 elements, first at \[1\]"),
        (np.arange(3), jnp.arange(3), "type: restored ndarray"),
        (np.arange(3), np.arange(3.0), r"restored int64\[3\], expected float64\[3\]"),
        (np.array([1, 2]), np.array([1, 3]), r"1 of 2 elements, first at \[1\]: restored .*2.*, expected .*3"),
        (np.float32(1), np.float64(1), "type: restored float32"),
        ({"lr": 0.0}, {"lr": -0.0}, r"\['lr'\]: restored 0.0, expected -0.0"),
        ({"name": "a"}, {"name": "b"}, "restored 'a', expected 'b'"),
        (True, 1, "type: restored bool"),
    ],
)
def test_every_difference_is_named(restored, expected, why):
    with pytest.raises(AssertionError, match=why):
        assert_identical(restored, expected)


def test_memory_kinds_differ():
    host = jax.device_put(
        jnp.arange(4.0), jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    )
    with pytest.raises(AssertionError, match=r"sharding|memory kind"):
        assert_identical(host, jnp.arange(4.0))


def test_another_mesh_may_be_allowed():
    assert_identical(jax.device_put(jnp.arange(8.0), ROWS), jnp.arange(8.0), placement=False)
    with pytest.raises(AssertionError, match="weak type"):
        assert_identical(with_weak_type(jnp.ones(2), True), jnp.ones(2), placement=False)


def test_ten_leaves_are_named_and_the_rest_counted():
    with pytest.raises(AssertionError, match="and 2 more"):
        assert_identical(list(range(12)), list(range(1, 13)))
