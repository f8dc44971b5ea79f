"""States that are written by this package and loaded by plain Orbax, in processes that do not have this package."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Moments = collections.namedtuple("Moments", "mu nu")


def mesh(rows: int = 2, columns: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("a", "b"))


def sharded(x: Any, *axes: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), P(*axes)))


def training() -> Any:
    params = {
        "w": sharded(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "a", "b"),
        "rows": sharded(jnp.arange(24, dtype=jnp.float32).reshape(8, 3), ("a", "b")),
        "same": sharded(jnp.arange(6, dtype=jnp.bfloat16)),
        "scale": sharded(jnp.float32(0.5)),
    }
    keys = jax.device_put(jax.random.split(jax.random.key(1, impl="rbg"), 4), NamedSharding(mesh(), P("a")))
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "moments": Moments(jnp.ones(2), [jnp.zeros(3), (jnp.ones(1), 4)]),
        "key": jax.random.key(3),
        "keys": keys,
        "step": 7,
    }


def plain() -> Any:
    return {
        "int": -3,
        "large": 2**62,
        "unsigned": 2**63,
        "float": 2.5,
        "nan": float("nan"),
        "bool": True,
        "false": False,
        "np": np.arange(6, dtype=np.int16).reshape(2, 3),
        "big": np.arange(3, dtype=">f4"),
        "text": "héllo\n",
        "none": None,
        "empties": {"d": {}, "l": [], "t": ()},
        "list": [1, "two", None, np.ones(2)],
        "zero": jnp.zeros((0, 3), jnp.int32),
        "npzero": np.zeros((2, 0), np.float64),
        "scalar": np.float32(1.5),
        "flag": np.bool_(True),
        "brain": np.asarray(jnp.bfloat16(1.5))[()],
    }


def named() -> Any:
    """Names that filesystems, zarr, JSON pointers or Orbax could stumble over."""
    names = [
        "a/b",
        "a/b/d",
        "~",
        "~0",
        "%20",
        "a b",
        "a?b#c",
        "ключ/é",
        ".hidden",
        "...",
        "x.y",
        "C",
        "zarr",
        "",
    ]
    arrays = {name: jnp.full(2, i, jnp.float32) for i, name in enumerate(names)}
    texts = {"s/t": "nested", "s/u": "twice", "~1": "escaped", "über %41": "text", "0": "number"}
    return {**arrays, **texts, "int": {5: jnp.ones(1)}, "mlp/~/linear_0": {"w": jnp.ones(3)}}


def dtypes() -> Any:
    names = """bool int2 int4 int8 int16 int32 uint8 uint16 uint32 bfloat16 float16 float32 complex64 float4_e2m1fn
        float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
    found: dict[str, Any] = {name: sharded(jnp.arange(8).astype(name), "a") for name in names.split()}
    wide = {name: np.arange(4).astype(name) for name in ("int64", "uint64", "float64", "complex128")}
    return found | {f"np_{name}": x for name, x in wide.items()}


def unknown() -> Any:
    """What Orbax has no type for, among what it has."""
    return {
        "list": [1j, jnp.ones(2), b"x", 2**70, "text", jnp.arange(4).astype(jnp.uint4)],
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "names": np.array(["ab", "c"]),
        "text at ~": "lost",
        "surrogate": "\ud800",
        "kept": jnp.arange(3),
    }


def unknown_to_orbax() -> Any:
    return {
        "list": [None, jnp.ones(2), None, None, "text", None],
        "dates": None,
        "names": None,
        "text at ~": None,
        "surrogate": None,
        "kept": jnp.arange(3),
    }


def bare() -> Any:
    return sharded(jnp.arange(8), "a")


def bare_int() -> Any:
    return 3


def texts_only() -> Any:
    return {"a": "b"}


def nothing() -> Any:
    return {"a": {}, "b": None}


def ranks() -> Any:
    """What rank 0 of several has."""
    return {
        "w": jnp.arange(40, dtype=jnp.float32).reshape(8, 5),
        "same": np.arange(4),
        "own": np.zeros(3, int),
        "lr": 0.0,
    }


STATES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (training, plain, named, dtypes, unknown, bare, bare_int, texts_only, nothing, ranks)
}


def abstract(state: Any, rows: int | None = None, columns: int = 1) -> Any:
    """A template of what is to be loaded, on another mesh if `rows` says so."""

    def of(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        sharding = x.sharding
        if rows is not None and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh(rows, columns), sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of, state)


def facts(tree: Any, *, exact: bool) -> list[Any]:
    """What has to be equal of two trees: paths, kinds, element types, shapes, bits.

    Args:
        tree: Any pytree.
        exact: Also the types of nodes and of plain values. Without a template Orbax gives dictionaries and lists.
    """
    if not exact:
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return [(_loose_path(path), *_leaf(x, exact)[1:]) for path, x in flat]
    return [jax.tree.structure(tree), [_leaf(x, exact) for x in jax.tree.leaves(tree)]]


def _loose_path(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))) for key in path)


def _leaf(x: Any, exact: bool) -> tuple[Any, ...]:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return "key", str(jax.random.key_impl(x)), data.shape, data.tobytes()
    if not exact and isinstance(x, np.ndarray | np.generic | bool | int | float) and np.ndim(x) == 0:
        return "", repr(np.asarray(x).item())
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        array = np.asarray(x)
        native = array.astype(array.dtype.newbyteorder("="))
        return "jax" if isinstance(x, jax.Array) else "numpy", str(native.dtype), array.shape, native.tobytes()
    return type(x).__name__, repr(x)
