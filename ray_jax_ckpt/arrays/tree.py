"""Any pytree as a list of described leaves, and back.

Nothing here moves array bytes or starts a computation that needs other processes: every function may be called by one
process alone, from any thread.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    all_leaves,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
)

from ray_jax_ckpt.errors import UnsupportedLeafError
from ray_jax_ckpt.model.leaves import LeafSpec, checked_key_path
from ray_jax_ckpt.values import (
    VALUE_TYPES,
    decode_value,
    dtype_name,
    encode_value,
    is_plain_dtype,
    value_type_name,
    with_article,
)

__all__ = [
    "Flat",
    "LeafSpec",
    "checked_key_path",
    "decode_value",
    "describe",
    "encode_value",
    "flatten",
    "is_key",
    "is_static",
    "key_data",
    "mismatch",
    "plain",
    "typed_key_path",
    "with_weak_type",
    "wrap_key",
]

_MAX_MISMATCH_LINES = 10
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree.

    Attributes:
        paths: `jax.tree_util.keystr` of each leaf, in flattening order. "" for a state that is a single leaf.
        keys: The key path tuple of each leaf, as JAX gives it.
        leaves: The leaves themselves, not copied.
        treedef: What `jax.tree_util.tree_unflatten` needs to put the leaves back.
    """

    paths: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]
    leaves: list[Any]
    treedef: Any


_last: Flat | None = None


def flatten(state: Any) -> Flat:
    """Flattens any pytree; None and empty nodes are part of the structure, not leaves.

    Raises:
        UnsupportedLeafError: JAX cannot put the keys of a dictionary in order.
    """
    global _last
    try:
        leaves, treedef = tree_flatten(state, is_leaf=_is_iterator)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"the state cannot be flattened: {error}. The keys of one dictionary have to be of one type that has an "
            "order, such as str or int."
        ) from error
    known = _last
    # Of thousands of leaves the paths take longer than all else; a train state has the same ones at every step.
    if known is not None and _same(known.treedef, treedef):
        return dataclasses.replace(known, leaves=leaves)
    with_paths, treedef = tree_flatten_with_path(state, is_leaf=_is_iterator)
    keys = tuple(tuple(key_path) for key_path, _ in with_paths)
    flat = Flat(tuple(keystr(key) for key in keys), keys, [leaf for _, leaf in with_paths], treedef)
    # Without the leaves: they must not be kept alive.
    _last = dataclasses.replace(flat, leaves=[])
    return flat


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # What classes keep beside their leaves may not be comparable, such as arrays.
        return False


def _is_iterator(node: Any) -> bool:
    # JAX warns of these as leaves, and is going to refuse them in words that name neither path nor remedy.
    return isinstance(node, Iterator) and all_leaves([node])


def describe(path: str, key_path: Sequence[Any], leaf: Any) -> LeafSpec:
    """Describes a leaf that is to be saved.

    Args:
        path: `keystr` of the leaf; what errors name.
        key_path: Its key path tuple (`Flat.keys`).
        leaf: A concrete leaf.

    Raises:
        UnsupportedLeafError: it cannot be saved; the message names the path and the remedy.
    """
    if isinstance(leaf, Tracer):
        raise _unsupported(path, leaf, "it is a tracer: snapshot outside of jit, grad and vmap")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise _unsupported(path, leaf, "it has no content: pass the concrete state, not the abstract one")
    return _describe(path, key_path, leaf)


def _describe(path: str, key_path: Sequence[Any], leaf: Any) -> LeafSpec:
    typed = typed_key_path(key_path)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if is_key(leaf):
            impl, dtype = _key_impl(path, leaf)
            return LeafSpec(path, "key", tuple(leaf.shape), dtype, False, impl, typed)
        weak = bool(getattr(leaf, "weak_type", False))
        return LeafSpec(path, "array", tuple(leaf.shape), dtype_name(np.dtype(leaf.dtype)), weak, None, typed)
    if isinstance(leaf, np.ndarray):
        _check_numpy(path, leaf)
        return LeafSpec(path, "numpy", leaf.shape, dtype_name(leaf.dtype), False, None, typed)
    if type(leaf) in VALUE_TYPES or (isinstance(leaf, np.generic) and is_plain_dtype(leaf.dtype)):
        return LeafSpec(path, "value", (), value_type_name(leaf), False, None, typed)
    raise _unsupported(path, leaf, _remedy(leaf))


def _check_numpy(path: str, leaf: np.ndarray) -> None:
    if type(leaf) not in (np.ndarray, np.memmap):
        raise _unsupported(path, leaf, "a subclass of np.ndarray would lose what it adds: convert it with np.asarray")
    if not is_plain_dtype(leaf.dtype):
        remedy = "objects have no bytes of their own: convert it to a numeric array, or keep it out of the state"
        if not leaf.dtype.hasobject:
            remedy = "structured arrays are not supported: save each field as a leaf of its own"
        raise _unsupported(path, leaf, f"its dtype is {leaf.dtype}; {remedy}")


def _remedy(leaf: Any) -> str:
    if isinstance(leaf, set | frozenset):
        return "sets have no order: save sorted(...) instead"
    if hasattr(leaf, "get_state") or hasattr(leaf, "__next__"):
        return "iterators do not belong in the state: pass it as data= (get_state and set_state), or save its position"
    if callable(leaf):
        return "functions cannot be saved: keep it out of the state (flax: nnx.split; equinox: eqx.partition)"
    if isinstance(leaf, VALUE_TYPES):
        return "a subclass of a plain type would lose its class: convert it to the plain type"
    return "register its class as a pytree node, or convert it to arrays, numbers or strings"


def _unsupported(path: str, leaf: Any, why: str) -> UnsupportedLeafError:
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return UnsupportedLeafError(f"leaf {path or '(the whole state)'} of type {kind} cannot be snapshotted: {why}.")


def typed_key_path(key_path: Sequence[Any]) -> list[list[Any]]:
    """A key path as JSON: see `LeafSpec.key_path`."""
    return [_typed_key(key) for key in key_path]


def _typed_key(key: Any) -> list[Any]:
    match key:
        case DictKey(key=str() as name) if type(name) is str:
            return ["d", name]
        case DictKey(key=int() as number) if type(number) is int:
            return ["di", number]
        case SequenceKey(idx=int() as index):
            return ["s", index]
        case GetAttrKey(name=str() as name):
            return ["a", name]
        case FlattenedIndexKey(key=int() as index):
            return ["f", index]
        case _:
            if _ADDRESS.search(str(key)):
                raise UnsupportedLeafError(
                    f"key {key} of the state is known by its address only, which another process does not have. Use "
                    "str or int keys."
                )
            return ["r", str(key)]


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key array, concrete or abstract. Raw uint32 key data is not."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def key_data(x: jax.Array) -> jax.Array:
    """Returns the data of a typed PRNG key array, on the same devices and kind of memory; shares its buffers."""
    return jax.random.key_data(x)


def plain(leaf: Any) -> Any:
    """The data of a typed PRNG key array, and anything else as it is."""
    return key_data(leaf) if is_key(leaf) else leaf


def wrap_key(data: jax.Array, impl: str) -> jax.Array:
    """Returns the typed PRNG key array with this data; the inverse of `key_data`. Shares its buffers."""
    return jax.random.wrap_key_data(data, impl=impl)


def _key_impl(path: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, str]:
    # JAX has no public way from a key dtype (all that an abstract leaf has) to its implementation.
    impl = leaf.dtype._impl  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(leaf, jax.Array) and not isinstance(jax.random.key_impl(leaf), str):
        raise _unsupported(path, leaf, "its PRNG implementation has no registered name, so it could not be put back")
    return impl.name, "uint32"


def with_weak_type(x: jax.Array, weak: bool) -> jax.Array:
    """Returns the same array, weakly typed or not.

    The only place where weak types are set. Value, sharding, memory kind and committedness are those of `x`, no bytes
    are copied and no computation runs, so one process may call it alone. The result shares `x`'s buffers: use only one
    of the two afterwards. PRNG keys have no weak type and are returned as they are.
    """
    if bool(getattr(x, "weak_type", weak)) == weak:
        return x
    # Only the constructor of the concrete class takes a weak type.
    concrete: Any = x
    shards = [shard.data for shard in x.addressable_shards]
    aval = concrete.aval.update(weak_type=weak)
    return type(concrete)(aval, x.sharding, shards, committed=x.committed, _skip_checks=True)


def is_static(leaf: Any) -> bool:
    """Whether a template's leaf is a function or class, which no snapshot has: the template's own is taken.

    So the template may be a whole model whose arrays were snapshotted (`eqx.filter(model, eqx.is_array)`).
    """
    return callable(leaf)


def mismatch(saved_specs: Sequence[LeafSpec], wanted: Flat, *, partial: bool, cast: bool) -> str | None:
    """Says how a template and what was saved differ, or returns None if they fit each other.

    Args:
        saved_specs: What was saved.
        wanted: The flattened template; its leaves may be concrete, or `jax.ShapeDtypeStruct`.
        partial: The template may lack leaves that were saved.
        cast: Arrays may differ in dtype.

    Returns:
        At most ten lines, one per leaf, each with the path and both sides.

    Raises:
        UnsupportedLeafError: a leaf of the template is nothing that could have been saved.
    """
    saved = {spec.path: spec for spec in saved_specs}
    lines = []
    for path, key, leaf in zip(wanted.paths, wanted.keys, wanted.leaves, strict=True):
        have = saved.pop(path, None)
        if is_static(leaf):
            if have is not None:
                kind = with_article(type(leaf).__name__)
                lines.append(f"{path or '(root)'}: the template has {kind}, the snapshot has {have}")
            continue
        want = _describe(path, key, leaf)
        if have is None:
            lines.append(f"{path or '(root)'}: the template wants {want}, the snapshot has no such leaf")
        elif (why := _leaf_mismatch(have, want, cast=cast)) is not None:
            lines.append(f"{path or '(root)'}: the template wants {want}, the snapshot has {have}{why}")
    if not partial:
        remedy = " (allowed with partial=True)"
        lines += [
            f"{s.path or '(root)'}: the snapshot has {s}, the template no such leaf{remedy}" for s in saved.values()
        ]
    if not lines:
        return None
    if len(lines) > _MAX_MISMATCH_LINES:
        lines[_MAX_MISMATCH_LINES - 1 :] = [
            f"... and {len(lines) - _MAX_MISMATCH_LINES + 1} more leaves that do not fit"
        ]
    return "\n".join(lines)


def _leaf_mismatch(have: LeafSpec, want: LeafSpec, *, cast: bool) -> str | None:
    """Returns None if the two fit, else a remark (possibly empty) on why they do not."""
    arrays = {"array", "numpy"}
    if have.kind != want.kind and not {have.kind, want.kind} <= arrays:
        return ""
    if have.shape != want.shape or have.key_impl != want.key_impl:
        return ""
    if have.dtype != want.dtype and not (cast and have.kind in arrays):
        return " (cast=True converts)" if have.kind in arrays else ""
    return None
