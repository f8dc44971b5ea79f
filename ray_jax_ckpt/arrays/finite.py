"""Whether captured bytes hold NaN or infinity, at memory speed for every floating type that JAX has."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ray_jax_ckpt.arrays.tree import LeafSpec
from ray_jax_ckpt.errors import SnapshotError
from ray_jax_ckpt.model.index import Layout
from ray_jax_ckpt.values import decode_value

# Stays in a core's cache between the two passes, and is large enough that numpy works without the GIL.
_CHUNK_BYTES = 256 << 10
_MAX_NAMED = 5


def check_finite(layout: Layout, buffer: np.ndarray, values: Mapping[int, Any]) -> None:
    """Raises SnapshotError if `nonfinite_leaves` finds any: it names the first few, and the rank."""
    paths = nonfinite_leaves(layout, buffer, values)
    if paths:
        more = f" and {len(paths) - _MAX_NAMED} more leaves" if len(paths) > _MAX_NAMED else ""
        raise SnapshotError(
            f"NaN or infinity in {', '.join(paths[:_MAX_NAMED])}{more} on rank {layout.rank}; "
            "SnapshotConfig(reject_nonfinite=True) keeps such a state from being restored"
        )


def nonfinite_leaves(layout: Layout, buffer: np.ndarray, values: Mapping[int, Any]) -> list[str]:
    """Paths of the leaves with a NaN or an infinity in what this rank captured, in tree order.

    Integers, keys and strings are finite. Blocks for about as long as it takes to read the bytes once or twice.

    Args:
        layout: Of the buffer.
        buffer: uint8, filled.
        values: Encoded host values by leaf number.
    """
    found: set[int] = {leaf for leaf, value in values.items() if not _finite_value(decode_value(value))}
    specs = {leaf: LeafSpec.from_json(layout.leaves[leaf]) for leaf in {i.leaf for p in layout.parts for i in p.items}}
    dtypes = {leaf: np.dtype(spec.dtype) for leaf, spec in specs.items() if spec.kind in ("array", "numpy")}
    for part in layout.parts:
        for item in part.items:
            if item.leaf in dtypes and item.leaf not in found:
                start = part.offset + item.offset
                if not all_finite(buffer[start : start + item.num_bytes], dtypes[item.leaf]):
                    found.add(item.leaf)
    return [str(layout.leaves[leaf]["path"]) for leaf in sorted(found)]


def all_finite(data: np.ndarray, dtype: np.dtype) -> bool:
    """Whether bytes hold finite elements only.

    Args:
        data: uint8, whole elements.
        dtype: Of the elements; any. Those of types without NaN and infinity are all finite.
    """
    if dtype.kind == "c":
        dtype = np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}")
    if dtype.kind not in "fV":
        return True
    if dtype.itemsize == 1:
        return not any((chunk & mask == bad).any() for mask, bad in _bad_bytes(dtype) for chunk in _chunks(data))
    if dtype.itemsize not in (2, 4, 8):
        return all(bool(np.isfinite(chunk.view(dtype)).all()) for chunk in _chunks(data, dtype.itemsize * 1024))
    # NaN and infinity are what has all bits of the exponent set, which are the bits of infinity. Faster
    # than isfinite, which numpy does not vectorise for all types.
    unsigned = np.dtype(f"{dtype.byteorder if dtype.kind == 'f' else '='}u{dtype.itemsize}")
    exponent = np.array(math.inf, dtype).view(unsigned)[()]
    return not any((chunk.view(unsigned) & exponent).max() == exponent for chunk in _chunks(data))


def _chunks(data: np.ndarray, size: int = _CHUNK_BYTES) -> Iterable[np.ndarray]:
    return (data[start : start + size] for start in range(0, data.nbytes, size))


@functools.cache
def _bad_bytes(dtype: np.dtype) -> list[tuple[np.uint8, np.uint8]]:
    """The patterns of a one-byte type that are no finite numbers: (mask, what it leaves of them) of each group.

    Most types have one group, all with the bits of the exponent set.
    """
    patterns = np.arange(256, dtype=np.uint8)
    bad = patterns[~np.isfinite(patterns.view(dtype).astype(np.float32))]
    common = np.bitwise_and.reduce(bad) if bad.size else np.uint8(0)
    if bad.size and np.array_equal(patterns[patterns & common == common], bad):
        return [(common, common)]
    return [(np.uint8(0xFF), one) for one in bad]


def _finite_value(value: Any) -> bool:
    if isinstance(value, float | complex | np.inexact):
        return bool(np.isfinite(value))
    return True
