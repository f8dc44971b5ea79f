"""The description of an array whose chunks are files of raw bytes, and what Orbax makes of plain values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_jax_ckpt.values import decode_value

_BYTE_FLOATS = ("e3m4", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
ELEMENT_TYPES = frozenset(
    ["bool", "int2", "int4", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float8_{name}" for name in _BYTE_FLOATS]
)
"""What tensorstore's zarr3 driver has, with one byte per element where there are fewer than eight bits. It lacks uint2,
uint4, float8_e4m3, the six-bit floats, strings and dates."""


def is_known(dtype: str) -> bool:
    """Whether zarr has a name for an element type."""
    return np.dtype(dtype).name in ELEMENT_TYPES


def describe_array(shape: Sequence[int], dtype: str, chunks: Sequence[int]) -> bytes:
    """The `zarr.json` of an array whose chunks are not encoded: raw, row-major, in the byte order of `dtype`."""
    kind = np.dtype(dtype)
    codec: dict[str, Any] = {"name": "bytes"}
    if kind.itemsize > 1:
        codec["configuration"] = {"endian": "big" if kind.str[0] == ">" else "little"}
    whole = {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunks)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [codec],
        "data_type": kind.name,
        "fill_value": _zero(kind),
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    }
    return json.dumps(whole, separators=(",", ":")).encode()


def _zero(kind: np.dtype) -> Any:
    if kind.kind == "b":
        return False
    if kind.kind == "c":
        return [0.0, 0.0]
    return 0 if "int" in kind.name else 0.0


def as_scalar(encoded: Any) -> np.ndarray | None:
    """A plain number as the array without dimensions that Orbax keeps it as; None for what it has no type for.

    Args:
        encoded: By `ray_jax_ckpt.values.encode_value`.
    """
    value = decode_value(encoded)
    plain = isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating)
    # ml_dtypes' floats are none of numpy's.
    if not plain and not (isinstance(value, np.generic) and value.dtype.kind == "V"):
        return None
    array = np.asarray(value)
    return array if is_known(array.dtype.name) else None
