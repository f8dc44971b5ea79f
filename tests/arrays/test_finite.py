"""NaN and infinity are found in every floating type, whatever carries them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ray_jax_ckpt.arrays.finite import all_finite, check_finite, nonfinite_leaves
from ray_jax_ckpt.arrays.plan import Planner, Topology, capture
from ray_jax_ckpt.arrays.tree import flatten
from ray_jax_ckpt.errors import SnapshotError

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "longdouble"]
SMALL_FLOATS = [
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3"),
    *("float8_e3m4", "float8_e8m0fnu"),
]
ALWAYS_FINITE = ["int32", "uint8", "bool", "int4", "uint2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("name", [*FLOATS, *SMALL_FLOATS])
@pytest.mark.parametrize("position", [0, 77_777, 149_999])
def test_one_nan_is_found_anywhere(name, position):
    array = np.ones(150_000, np.dtype(name))
    assert all_finite(as_bytes(array), array.dtype)
    array[position] = np.nan
    assert not all_finite(as_bytes(array), array.dtype)


@pytest.mark.parametrize("name", [*FLOATS, "float8_e5m2", "float8_e4m3", "float8_e3m4"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_one_infinity_is_found_of_either_sign(name, bad):
    array = np.ones(100, np.dtype(name))
    array[50] = bad
    assert not all_finite(as_bytes(array), array.dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_the_largest_and_the_smallest_numbers_are_finite(name):
    info = ml_dtypes.finfo(name)
    array = np.array([info.max, info.min, info.tiny, info.smallest_subnormal, -0.0], np.dtype(name))
    assert all_finite(as_bytes(array), array.dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_pattern_of_two_bytes_is_judged_like_numpy_does(name):
    array = np.arange(1 << 16, dtype=np.uint16).view(np.dtype(name))
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(array)
    for value, finite in zip(array, expected, strict=True):
        assert all_finite(as_bytes(np.array([value])), array.dtype) == finite


@pytest.mark.parametrize("name", ALWAYS_FINITE)
def test_every_pattern_of_a_type_without_nan_is_finite(name):
    data = np.arange(256, dtype=np.uint8)
    if np.dtype(name).itemsize == 4:
        data = np.full(400, 0xFF, np.uint8)
    assert all_finite(data, np.dtype(name))


def test_byte_order_and_no_elements():
    array = np.array([1.0, np.nan], ">f4")
    assert not all_finite(as_bytes(array), array.dtype)
    assert all_finite(as_bytes(np.ones(9, ">f4")), np.dtype(">f4"))
    assert all_finite(np.empty(0, np.uint8), np.dtype("float32"))


def captured(state):
    flat = flatten(state)
    plan = Planner(Topology(0, ("a",), 1)).plan(flat)
    taken = capture(plan, flat)
    buffer = np.zeros(plan.layout.num_bytes, np.uint8)
    taken.write(buffer, lambda target, source: np.copyto(target, source) or "")
    return plan.layout, buffer, taken.values


def test_leaves_of_every_kind_are_named_by_path():
    state = {
        "good": jnp.ones((3, 5)),
        "bad": jnp.array([1.0, jnp.nan], jnp.bfloat16),
        "count": jnp.int32(7),
        "host": np.array([np.inf, 1.0]),
        "key": jax.random.key(3),
        "loss": float("nan"),
        "name": "nan",
        "scale": np.float32(1.0),
    }
    assert nonfinite_leaves(*captured(state)) == ["['bad']", "['host']", "['loss']"]


def test_a_finite_state_passes_and_a_bad_one_says_what_and_where():
    check_finite(*captured({"w": jnp.ones(4), "opt": (1, None)}))
    state = {f"w{i}": jnp.full(2, jnp.inf) for i in range(7)}
    with pytest.raises(SnapshotError, match=r"NaN or infinity in \['w0'\], .*\['w4'\] and 2 more leaves on rank 0"):
        check_finite(*captured(state))
