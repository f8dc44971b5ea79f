"""Whether a restored state is what was snapshotted, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_LINES = 10


def assert_identical(restored: Any, expected: Any, *, placement: bool = True) -> None:
    """Asserts that two states are the same in everything that a training can notice. Call it where `expected` lives.

    Compared are the tree's structure and, leaf by leaf, type, dtype, shape, weak type, PRNG key implementation, every
    bit (so NaN equals the same NaN, and 0.0 is not -0.0) and, of `jax.Array`s, sharding and memory kind. Of arrays that
    span processes, this process compares its own shards.

    Args:
        restored: A pytree.
        expected: A pytree.
        placement: Whether sharding and memory kind are compared. False for states that were restored onto another mesh.

    Raises:
        AssertionError: They differ; the message names up to ten leaves by path, with both sides.
    """
    import jax

    found, wanted = jax.tree_util.tree_flatten_with_path(restored), jax.tree_util.tree_flatten_with_path(expected)
    if found[1] != wanted[1]:
        raise AssertionError(f"the trees differ:\n restored {found[1]}\n expected {wanted[1]}")
    problems = []
    for (path, a), (_, b) in zip(found[0], wanted[0], strict=True):
        if problem := _difference(a, b, placement):
            problems.append(f"{jax.tree_util.keystr(path) or 'the state'}: {problem}")
    if problems:
        more = f"\n and {len(problems) - MAX_LINES} more" if len(problems) > MAX_LINES else ""
        raise AssertionError("restored and expected states differ:\n " + "\n ".join(problems[:MAX_LINES]) + more)


def _difference(a: Any, b: Any, placement: bool) -> str | None:
    import jax

    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        for name, look in _TRAITS.items() if placement else list(_TRAITS.items())[:4]:
            if look(a) != look(b):
                return f"{name}: restored {look(a)}, expected {look(b)}"
        return _bit_difference(_pieces(a), _pieces(b))
    if type(a) is not type(b):
        return f"type: restored {type(a).__name__}, expected {type(b).__name__}"
    if isinstance(a, np.ndarray | np.generic):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"restored {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        return _bit_difference([np.asarray(a)], [np.asarray(b)])
    return None if _plain(a) == _plain(b) else f"restored {a!r}, expected {b!r}"


def _plain(value: Any) -> Any:
    """What makes two plain values the same: NaN is itself, 0.0 is not -0.0."""
    return np.asarray(value).tobytes() if isinstance(value, float | complex) else value


def _key_implementation(x: Any) -> str | None:
    import jax

    from ray_jax_ckpt.arrays import tree

    return str(jax.random.key_impl(x)) if tree.is_key(x) else None


_TRAITS = {
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "weak type": lambda x: bool(getattr(x, "weak_type", False)),
    "key implementation": _key_implementation,
    "sharding": lambda x: x.sharding,
    "memory kind": lambda x: x.sharding.memory_kind,
}


def _pieces(x: Any) -> list[np.ndarray]:
    from ray_jax_ckpt.arrays import tree

    data = tree.plain(x)
    if data.is_fully_addressable:
        return [np.asarray(data)]
    return [np.asarray(shard.data) for shard in sorted(data.addressable_shards, key=lambda shard: shard.device.id)]


def _bit_difference(found: list[np.ndarray], wanted: list[np.ndarray]) -> str | None:
    if [piece.shape for piece in found] != [piece.shape for piece in wanted]:
        return f"shards: restored {[p.shape for p in found]}, expected {[p.shape for p in wanted]}"
    for a, b in zip(found, wanted, strict=True):
        differing = np.flatnonzero(_bytes_of(a) != _bytes_of(b))
        if differing.size:
            size = max(1, a.dtype.itemsize)
            elements = np.unique(differing // size)
            at = np.unravel_index(elements[0], a.shape)
            where = [int(i) for i in at]
            return f"{elements.size} of {a.size} elements, first at {where}: restored {a[at]!r}, expected {b[at]!r}"
    return None


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
