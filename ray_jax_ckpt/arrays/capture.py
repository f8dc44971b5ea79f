"""True copies of device arrays in pinned host memory, dispatched without waiting for them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.errors import NotSupportedError

logger = logging.getLogger(__name__)

HOST_MEMORY_KINDS = ("pinned_host", "unpinned_host")


def pin(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Dispatches copies of arrays to pinned host memory and returns them, without waiting for the bytes.

    When it returns, the sources may be donated, deleted or overwritten: the runtime orders the copies before that. The
    results never share memory with the sources, also when these are in host memory already. Each keeps the shape,
    dtype, weak type, key implementation and sharding of its source, but for the memory kind, and is committed. Every
    process may call it alone, also for arrays that span processes; only this process's shards are copied. Block on the
    results (or on their key data) to wait; an error of an asynchronous copy surfaces there.

    Where a device has no "pinned_host" memory, or none is left, the copies go to "unpinned_host", or else to arrays of
    the CPU backend; a warning says so once per process.

    Args:
        arrays: Any mix of arrays: of several devices, sharded, PRNG keys. One call with many is much faster than many
            calls.

    Raises:
        NotSupportedError: a device has no host memory to copy to at all.
        RuntimeError: an array was deleted or donated before.
    """
    for x in arrays:
        _check_there(x)
    copies = pin_bytes([tree.plain(x) for x in arrays])
    return [_like(x, copy) for x, copy in zip(arrays, copies, strict=True)]


def pin_bytes(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """As `pin`, for who only wants the bytes: takes no PRNG keys, and the copies' weak types are any.

    Its last work is to dispatch the copies, with which whatever Python does next shares the cores.
    """
    for x in arrays:
        _check_there(x)
    groups = [(sharding, indices, [arrays[i] for i in indices]) for sharding, indices in _by_sharding(arrays).items()]
    copies: list[Any] = [None] * len(arrays)
    for sharding, indices, group in groups:
        copy_group = _copy_group if sharding.is_fully_addressable else _copy_shards
        for i, copy in zip(indices, copy_group(group, sharding), strict=True):
            copies[i] = copy
    return copies


def _check_there(x: jax.Array) -> None:
    # The runtime's copy takes this on trust: it would crash the process.
    if x.is_deleted():
        raise RuntimeError(f"cannot capture {x.dtype}{list(x.shape)}: the array has been deleted or donated.")


def copy_host(x: np.ndarray) -> np.ndarray:
    """Returns a copy of a numpy array that owns its memory, in C order; later writes to `x` do not reach it."""
    return np.array(x, copy=True, order="C", subok=False)


def _by_sharding(arrays: Sequence[jax.Array]) -> dict[jax.sharding.Sharding, list[int]]:
    groups: dict[jax.sharding.Sharding, list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(x.sharding, []).append(i)
    return groups


def _copy_shards(arrays: list[jax.Array], sharding: jax.sharding.Sharding) -> list[jax.Array]:
    """Copies this process's shards of arrays that span processes, for which JAX has no copy without all processes."""
    shards = [[shard.data for shard in x.addressable_shards] for x in arrays]
    copies = iter(pin([shard for of_array in shards for shard in of_array]))
    assembled = []
    for x, of_array in zip(arrays, shards, strict=True):
        parts = [next(copies) for _ in of_array]
        kind = (parts[0].sharding.memory_kind if parts else None) or HOST_MEMORY_KINDS[0]
        target = sharding.with_memory_kind(kind)
        assembled.append(jax.make_array_from_single_device_arrays(x.shape, target, parts, dtype=x.dtype))
    return assembled


def _like(source: jax.Array, copy: jax.Array) -> jax.Array:
    if tree.is_key(source):
        return tree.wrap_key(copy, str(jax.random.key_impl(source)))
    return tree.with_weak_type(copy, bool(source.weak_type))  # pyright: ignore[reportAttributeAccessIssue]


def _copy_group(arrays: list[jax.Array], sharding: jax.sharding.Sharding) -> list[jax.Array]:
    reason = "the devices have no pinned_host memory"
    for kind in _host_kinds(sharding):
        try:
            copies = batched_copy(arrays, sharding.with_memory_kind(kind))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = f"no room in {kind} memory: {error!s:.200}"
        else:
            if kind != HOST_MEMORY_KINDS[0]:
                _warn_once(kind, reason)
            return copies
    copies = batched_copy(arrays, _pageable(sharding))
    _warn_once("the CPU backend's pageable", reason)
    return copies


def _host_kinds(sharding: jax.sharding.Sharding) -> list[str]:
    """Returns the host memory kinds that all of this process's devices of a sharding have, best first."""
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in sharding.addressable_devices]
    return [kind for kind in HOST_MEMORY_KINDS if all(kind in of_device for of_device in kinds)]


def _pageable(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if len(sharding.device_set) > 1:
        raise NotSupportedError(f"no host memory for arrays sharded as {sharding}: capture their shards one by one.")
    try:
        return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:
        raise NotSupportedError(
            "the devices have no host memory kind and there is no CPU backend: add cpu to JAX_PLATFORMS."
        ) from error


_warned: set[str] = set()


def _warn_once(kind: str, reason: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        what = f"snapshots go to {kind} memory, which is slower to copy to than pinned_host"
        warnings.warn(f"{what} ({reason}).", RuntimeWarning, stacklevel=2)


def _device_put(arrays: list[jax.Array], target: jax.sharding.Sharding) -> list[jax.Array]:
    return jax.device_put(arrays, [target] * len(arrays), may_alias=False)


def _runtime_copy(arrays: list[jax.Array], target: jax.sharding.Sharding) -> list[jax.Array]:
    """What `jax.device_put` ends in, without its Python work per leaf: a quarter of the time for 5,000 small leaves."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    n = len(arrays)
    always = xla_client.ArrayCopySemantics.ALWAYS_COPY
    devices = target._internal_device_list  # pyright: ignore[reportAttributeAccessIssue]
    return xla_client.batched_copy_array_to_devices_with_sharding(arrays, [devices] * n, [target] * n, [always] * n)


_copy: Callable[[list[jax.Array], jax.sharding.Sharding], list[jax.Array]] = _runtime_copy


def batched_copy(arrays: list[jax.Array], target: jax.sharding.Sharding) -> list[jax.Array]:
    """Dispatches true copies of fully addressable arrays of one sharding to another; none of them is deleted."""
    global _copy
    same_devices = arrays[0].sharding.device_set == target.device_set
    if _copy is _runtime_copy and same_devices:
        try:
            return _runtime_copy(arrays, target)
        except (ImportError, AttributeError, TypeError) as error:
            logger.info("this version of jax has no batched copy at the runtime's level (%s): using device_put", error)
            _copy = _device_put
    return _device_put(arrays, target)
