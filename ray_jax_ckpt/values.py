"""Scalars, strings and small nested states as JSON, exactly: types, bits, nothing executable."""

from __future__ import annotations

import base64
import binascii
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (np.dtype("bfloat16") and its like exist only once this is imported)
import numpy as np

from ray_jax_ckpt.errors import DataStateError

VALUE_TYPES: tuple[type, ...] = (bool, int, float, complex, str, bytes)

# The key that marks a JSON object as something else than a dictionary with string keys.
_TAG = "$"
# JSON readers other than Python's keep numbers as doubles: larger integers go as text.
_MAX_JSON_INT = 2**53
# From this size on, in bytes, contents can be kept beside the JSON: as text they would cost a third more and be copied
# with every copy of it.
_MIN_BLOB_BYTES = 4096


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Returns a name from which `np.dtype` makes the same dtype, byte order included."""
    if dtype.kind in "USMm" or not dtype.isnative:
        return dtype.str
    return dtype.name


def is_plain_dtype(dtype: np.dtype) -> bool:
    """Whether the elements are bytes of a fixed meaning: no objects, no fields, no untyped voids, no sub-arrays."""
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None and dtype.type is not np.void


def value_type_name(x: Any) -> str:
    """Returns the name of a value's exact type: "int", "str", ..., "numpy.float32", "numpy.str_"."""
    if isinstance(x, np.str_ | np.bytes_):
        return f"numpy.{type(x).__name__}"
    return f"numpy.{dtype_name(x.dtype)}" if isinstance(x, np.generic) else type(x).__name__


def with_article(name: str) -> str:
    """A name in a sentence: "an object", "a dict"."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def encode_value(x: Any, *, blobs: list[bytes] | None = None, default: Callable[[Any, str], Any] | None = None) -> Any:
    """Encodes a value, or nested containers of values, as what strict JSON can hold.

    Takes None, bool, int of any size, float (every bit pattern), complex, str, bytes, numpy scalars and arrays of plain
    dtypes, and dict (str and int keys), list and tuple of these. Subclasses are refused: their class would be lost.

    Args:
        x: The value. What it holds is copied where it could change.
        blobs: Gets large contents, which the result then refers to by position. None: they are in the result.
        default: Encodes what is none of these, given it and its path, or raises.

    Raises:
        DataStateError: something else is in it; the message names its path.
    """
    try:
        return _Encoder(blobs, default or _refuse).encode(x, "")
    except RecursionError:
        raise DataStateError("the value is nested too deeply, or contains itself.") from None


def decode_value(j: Any, blobs: Sequence[Any] = ()) -> Any:
    """Decodes what `encode_value` made; values, types and bits are those that went in. Arrays are new and writable.

    Args:
        j: Parsed JSON.
        blobs: What `encode_value` put beside it, as buffers of bytes.

    Raises:
        DataStateError: this is not what `encode_value` writes.
    """
    try:
        return _decode(j, blobs)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, struct.error, binascii.Error) as error:
        raise DataStateError(f"damaged value ({type(error).__name__}: {error}): {j!r:.200}") from error


class _Encoder:
    """See `encode_value`."""

    def __init__(self, blobs: list[bytes] | None, default: Callable[[Any, str], Any]) -> None:
        self._blobs, self._default = blobs, default

    def encode(self, x: Any, path: str) -> Any:
        if x is None or type(x) is bool:
            return x
        if isinstance(x, np.generic | np.ndarray):
            return self._numpy(x, path)
        if type(x) is bytes:
            return {_TAG: "bytes", "v": self._content(x)}
        if type(x) in _SCALARS:
            return _SCALARS[type(x)](x)
        if type(x) is list:
            return [self.encode(item, f"{path}[{i}]") for i, item in enumerate(x)]
        if type(x) is tuple:
            return {_TAG: "tuple", "v": [self.encode(item, f"{path}[{i}]") for i, item in enumerate(x)]}
        if type(x) is dict:
            return self._dict(x, path)
        return self._default(x, path)

    def _dict(self, x: dict[Any, Any], path: str) -> Any:
        for key in x:
            if type(key) not in (str, int):
                raise DataStateError(
                    f"the dictionary at {path or '(the top)'} has the key {key!r}; keys must be str or int."
                )
        items = [(key, self.encode(item, f"{path}[{key!r}]")) for key, item in x.items()]
        if _TAG not in x and all(isinstance(key, str) and not _has_surrogates(key) for key in x):
            return dict(items)
        return {_TAG: "dict", "v": [[self.encode(key, path), item] for key, item in items]}

    def _numpy(self, x: np.generic | np.ndarray, path: str) -> Any:
        if isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap):
            raise DataStateError(
                f"the value at {path or '(the top)'} is {with_article(type(x).__name__)}; convert it with np.asarray."
            )
        if not is_plain_dtype(x.dtype):
            raise DataStateError(f"the value at {path or '(the top)'} has dtype {x.dtype}, which cannot be saved.")
        # As array elements these two would lose trailing NULs.
        if isinstance(x, np.str_):
            return {_TAG: "np.str", "v": _encode_str(x[:])}
        if isinstance(x, np.bytes_):
            return {_TAG: "np.bytes", "v": self._content(x[:])}
        encoded = {_TAG: "np", "d": dtype_name(x.dtype), "v": self._content(x.tobytes())}
        return encoded | ({"s": list(x.shape)} if isinstance(x, np.ndarray) else {})

    def _content(self, x: bytes) -> str | int:
        """The bytes as text, or the position where they are kept beside it."""
        if self._blobs is None or len(x) < _MIN_BLOB_BYTES:
            return base64.b64encode(x).decode("ascii")
        self._blobs.append(x)
        return len(self._blobs) - 1


def _refuse(x: Any, path: str) -> Any:
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    raise DataStateError(
        f"the value at {path or '(the top)'} is {with_article(kind)}, which cannot be saved. Use numbers, strings, "
        "bytes, numpy arrays, and dict, list or tuple of these."
    )


def _encode_int(x: int) -> Any:
    return x if abs(x) < _MAX_JSON_INT else {_TAG: "int", "v": hex(x)}


def _encode_float(x: float) -> Any:
    # NaNs have payloads, and strict JSON has neither them nor infinities.
    return x if math.isfinite(x) else {_TAG: "float", "v": struct.pack("<d", x).hex()}


def _encode_complex(x: complex) -> Any:
    return {_TAG: "complex", "v": struct.pack("<dd", x.real, x.imag).hex()}


def _encode_str(x: str) -> Any:
    # Two lone surrogates would come back from JSON as the one character that they spell.
    return (
        {_TAG: "str", "v": base64.b64encode(x.encode("utf-8", "surrogatepass")).decode()} if _has_surrogates(x) else x
    )


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
}


def _has_surrogates(x: str) -> bool:
    return not x.isascii() and any("\ud800" <= c <= "\udfff" for c in x)


def _from_content(x: Any, blobs: Sequence[Any]) -> Any:
    return base64.b64decode(x, validate=True) if isinstance(x, str) else blobs[_position(x)]


def _position(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"{x!r} is no position")
    return x


def _decode(j: Any, blobs: Sequence[Any]) -> Any:
    if j is None or isinstance(j, bool | int | float | str):
        return j
    if isinstance(j, list):
        return [_decode(item, blobs) for item in j]
    if not isinstance(j, dict):
        raise TypeError(f"{type(j).__name__} is not JSON")
    if _TAG not in j:
        return {key: _decode(item, blobs) for key, item in j.items()}
    return _decode_tagged(j[_TAG], j, blobs)


def _decode_tagged(tag: Any, j: dict[str, Any], blobs: Sequence[Any]) -> Any:
    if tag == "np":
        return _decode_numpy(j, blobs)
    if tag not in _DECODERS:
        raise ValueError(f"unknown tag {tag!r}")
    return _DECODERS[tag](j["v"], blobs)


def _decode_complex(content: Any, _: Any) -> complex:
    return complex(*struct.unpack("<dd", bytes.fromhex(content)))


_DECODERS: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "tuple": lambda content, blobs: tuple(_decode(item, blobs) for item in content),
    "dict": lambda content, blobs: {_decode(key, blobs): _decode(item, blobs) for key, item in content},
    "int": lambda content, _: int(content, 16),
    "float": lambda content, _: struct.unpack("<d", bytes.fromhex(content))[0],
    "complex": _decode_complex,
    "str": lambda content, _: base64.b64decode(content, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda content, blobs: bytes(_from_content(content, blobs)),
    "np.str": lambda content, blobs: np.str_(_decode(content, blobs)),
    "np.bytes": lambda content, blobs: np.bytes_(bytes(_from_content(content, blobs))),
}


def _decode_numpy(j: dict[str, Any], blobs: Sequence[Any]) -> Any:
    dtype = np.dtype(j["d"])
    if not is_plain_dtype(dtype):
        raise ValueError(f"dtype {dtype} is not allowed")
    content = _from_content(j["v"], blobs)
    shape = tuple(j.get("s", ()))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is not allowed")
    # Not np.frombuffer: it refuses empty buffers and element size 0, and gives arrays that cannot be written.
    array = np.ndarray(shape, dtype, bytearray(content))
    if array.nbytes != len(content):
        raise ValueError(f"{len(content)} bytes for {dtype}{list(shape)}")
    return array if "s" in j else array[()]
