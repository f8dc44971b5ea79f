"""Whether a state came back as it was: bit by bit, with everything that JAX knows of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_same(found: Any, wanted: Any) -> None:
    """Structure, types, dtypes, shapes, weak types, implementations of keys, shardings, memory kinds, and every bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        where = jax.tree_util.keystr(path)
        assert type(a) is type(b), where
        if isinstance(a, jax.Array):
            assert (a.dtype, a.shape, a.sharding, a.committed) == (b.dtype, b.shape, b.sharding, b.committed), where
            assert a.sharding.memory_kind == b.sharding.memory_kind, where
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), where
        assert_bits(a, b, where)


def assert_bits(a: Any, b: Any, where: str = "") -> None:
    if is_key(a):
        assert jax.random.key_impl(a) == jax.random.key_impl(b), where
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        x, y = np.asarray(a), np.asarray(b)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), where
        assert x.tobytes() == y.tobytes(), where
    else:
        assert repr(a) == repr(b), where


def abstract(state: Any) -> Any:
    """Arrays and keys without content, with their shardings; what is on the host stays."""

    def of(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        weak = bool(getattr(x, "weak_type", False)) and not is_key(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None, weak_type=weak)

    return jax.tree.map(of, state)
