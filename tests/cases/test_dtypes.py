"""Numbers come back with their dtype and every bit, and are converted only on request."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ray_jax_ckpt as rjc
from cases.compare import abstract, assert_bits, assert_same
from cases.conftest import BOTH_TIERS
from ray_jax_ckpt.errors import TreeMismatchError

pytestmark = BOTH_TIERS

ROWS = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("d",)), P("d"))
NARROW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4", "int2", "bool"]
WIDE = ["float32", "complex64", "int8", "uint8", "int16", "uint16", "int32", "uint32"]


def all_bits(dtype):
    """Every bit pattern of a narrow dtype, many of a wide one."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return np.arange(64) % 3 == 0
    if dtype.kind in "iu" or "int" in dtype.name:
        bits = jnp.iinfo(dtype).bits
        return (np.arange(64) * 0x9E3779B9 % 2**bits - (2 ** (bits - 1) if jnp.iinfo(dtype).min else 0)).astype(dtype)
    if dtype.itemsize <= 2:
        size = dtype.itemsize
        return np.arange(256**size, dtype=f"u{size}").view(dtype)
    return np.random.default_rng(0).integers(0, 256, 64 * dtype.itemsize, np.uint8).view(dtype)


def test_every_dtype_keeps_every_bit_on_devices_and_on_the_host(run):
    host = {name: all_bits(name) for name in NARROW + WIDE}
    state = {
        "device": {name: jnp.asarray(x) for name, x in host.items()},
        "sharded": {name: jax.device_put(x, ROWS) for name, x in host.items()},
        "host": host
        | {"i8": np.array([2**63 - 1, -(2**63)]), "f8": np.array([0.1, np.nan, -0.0]), "text": np.array(["x", "yz"])},
    }
    assert len(jax.tree.leaves(state["device"])) == len(NARROW + WIDE)
    assert_same(run.trip(state, abstract(state)), state)
    bare = run.trip(state)
    for name, x in host.items():
        assert_bits(bare["sharded"][name], x, name)


def test_plain_values_stay_exact(run):
    state = {
        "ints": [2**31, 2**53 + 1, -(2**63), 2**64 - 1, 10**40, True],
        "floats": [0.1, float("inf"), float("nan"), -0.0, 5e-324],
        "complex": {"c": 1 + 2j},
        "texts": {"name": "run-7", "bytes": b"\x00\xff", "empty": "", "ключ": "значение"},
        "numpy": [
            np.int64(2**62 + 1),
            np.float16(0.1),
            ml_dtypes.bfloat16(1.5),
            np.bool_(True),
            np.str_("x"),
            np.complex64(1j),
        ],
        "single": jnp.arange(3),
    }
    assert_same(run.trip(state, state), state)
    assert_same(run.trip(state)["ints"], state["ints"])


@pytest.mark.parametrize(
    ("saved", "wanted", "expected"),
    [
        (jnp.int32(16777217), jnp.float32, 16777216.0),
        (jnp.float32(1.00390625), jnp.bfloat16, 1.0),
        (jnp.bfloat16(1.5), jnp.float32, 1.5),
        (jnp.int32(-1), jnp.uint32, 2**32 - 1),
        (jnp.float32(2.5), jnp.int32, 2),
        (jnp.uint8(1), jnp.bool_, True),
    ],
    ids=lambda x: str(getattr(x, "dtype", getattr(x, "__name__", x))),
)
def test_another_dtype_is_refused_by_name_and_cast_on_request(run, saved, wanted, expected):
    state = {"opt": {"events": saved, "other": jnp.ones(2)}}
    template = {"opt": {"events": jax.ShapeDtypeStruct((), wanted), "other": jnp.ones(2)}}
    handle = run.snapshot(state)
    sides = rf"the template wants {jnp.dtype(wanted)}\[\], the snapshot has {saved.dtype}\[\]"
    text = rf"\['opt'\]\['events'\]: {sides}.*cast=True"
    with pytest.raises(TreeMismatchError, match=text):
        rjc.restore(handle, template)
    found = rjc.restore(handle, template, cast=True).state["opt"]["events"]
    assert found.dtype == wanted
    assert found.item() == expected
