"""What can be saved besides pytrees: models, objects with a state, dataclasses; as a tree, and back into them.

A tree is made so that plain Orbax can read it: dictionaries, lists, tuples, arrays, numbers and strings where possible.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays.tree import with_weak_type, wrap_key
from ray_jax_ckpt.model.leaves import LeafSpec


def to_tree(target: Any) -> Any:
    """The pytree that is saved of a target.

    Objects with `get_state` and `set_state` give their state, flax nnx modules and optimizers all their variables
    (parameters, statistics, counts and keys of generators) as nested dictionaries, dataclasses that are no pytrees
    their fields. So do those within dictionaries, lists and tuples; any other pytree is taken as it is.
    """
    # Most of what a tree holds: of thousands the questions below would take milliseconds.
    if isinstance(target, jax.Array | np.ndarray):
        return target
    # First: what a model's author wrote knows it better.
    if _has_state(target):
        return to_tree(target.get_state())
    if _is_nnx(target):
        nnx = sys.modules["flax.nnx"]
        return nnx.to_pure_dict(nnx.state(target))
    if _is_record(target):
        return {name: to_tree(value) for name, value in _fields(target).items()}
    if type(target) is dict:
        return {key: to_tree(value) for key, value in target.items()}
    if type(target) in (list, tuple):
        return type(target)(map(to_tree, target))
    return target


def put_back(target: Any, tree: Any) -> Any:
    """Puts a restored tree, of the structure that `to_tree(target)` has, into a target.

    Returns:
        The target: the same object if it is a module or has a state, else a new one of its kind.
    """
    if _has_state(target):
        target.set_state(put_back(target.get_state(), tree))
        return target
    if _is_nnx(target):
        nnx = sys.modules["flax.nnx"]
        state = nnx.state(target)
        nnx.replace_by_pure_dict(state, tree)
        nnx.update(target, state)
        return target
    if _is_record(target):
        return dataclasses.replace(target, **{name: put_back(x, tree[name]) for name, x in _fields(target).items()})
    if type(target) is dict:
        return {key: put_back(value, tree[key]) for key, value in target.items()}
    if type(target) in (list, tuple):
        return type(target)(put_back(x, restored) for x, restored in zip(target, tree, strict=True))
    return tree


def as_saved(tree: Any, specs: Sequence[LeafSpec]) -> Any:
    """A tree that was restored without a template, with JAX's arrays and keys where such were saved.

    What JAX could not hold, 64 bits without `jax_enable_x64`, stays with numpy.
    """
    return _as_saved(tree, {tuple(key for _, key in spec.key_path): spec for spec in specs}, ())


def _as_saved(node: Any, specs: Mapping[tuple[Any, ...], LeafSpec], path: tuple[Any, ...]) -> Any:
    if isinstance(node, dict):
        return {key: _as_saved(child, specs, (*path, key)) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_as_saved(child, specs, (*path, i)) for i, child in enumerate(node))
    spec = specs.get(path)
    if spec is None or spec.kind not in ("array", "key") or jax.dtypes.canonicalize_dtype(node.dtype) != node.dtype:
        return node
    # A copy: of numpy's memory it would be an alias, which cannot be donated.
    array = with_weak_type(jax.numpy.array(node), spec.weak_type)
    return wrap_key(array, str(spec.key_impl)) if spec.kind == "key" else array


def _is_nnx(x: Any) -> bool:
    # Whoever has a module has imported this.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def _has_state(x: Any) -> bool:
    return callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", None))


def _is_record(x: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(x) and not isinstance(x, type)
    return is_dataclass and jax.tree_util.all_leaves([x]) and not isinstance(x, jax.ShapeDtypeStruct)


def _fields(x: Any) -> dict[str, Any]:
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if field.init}
