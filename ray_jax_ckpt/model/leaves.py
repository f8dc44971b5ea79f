"""What a leaf of a tree is, without its content: known to workers, stores and readers of storage alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

LeafKind = Literal["array", "key", "numpy", "value"]

_KEY_TYPES: Mapping[str, type] = {"d": str, "di": int, "s": int, "a": str, "f": int, "r": str}


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What a leaf is, without its content.

    Attributes:
        path: `keystr` of the leaf.
        kind: "array" (jax.Array), "key" (typed PRNG key array), "numpy" (np.ndarray), "value" (scalar, str, bytes).
        shape: Global shape; of a key the shape of the key array, without the dimensions of its data; of a value ().
        dtype: Name of the element type that `np.dtype` understands; of a key that of its data; of a value its type.
        weak_type: Whether a jax.Array is weakly typed.
        key_impl: Name of the PRNG implementation of a key, else None.
        key_path: The key path as JSON: `["d", name]` and `["di", 3]` dictionary keys, `["s", 0]` sequence,
            `["a", name]` attribute, `["f", 1]` flattened index, `["r", text]` anything else.
    """

    path: str
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    key_impl: str | None
    key_path: list[list[Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary that JSON can hold."""
        return vars(self) | {"shape": list(self.shape), "key_path": [list(key) for key in self.key_path]}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> LeafSpec:
        """Reads what `to_json` wrote; unknown fields of newer versions are ignored.

        Raises:
            ValueError: a field is missing, or is not of its type.
        """
        try:
            fields = {name: json[name] for name in _FIELDS}
            key_path = checked_key_path(json["key_path"])
            spec = cls(**fields | {"shape": tuple(json["shape"]), "key_path": key_path})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the description of a leaf ({error!r}): {json!r:.200}") from error
        if spec.kind not in ("array", "key", "numpy", "value") or not all(
            type(n) is int and n >= 0 for n in spec.shape
        ):
            raise ValueError(f"not the description of a leaf: {json!r:.200}")
        return spec

    def __str__(self) -> str:
        if self.kind == "value":
            return f"a value of type {self.dtype}"
        shape = ",".join(map(str, self.shape))
        if self.kind == "key":
            return f"a {self.key_impl} PRNG key array [{shape}]"
        return f"{self.dtype}[{shape}]"


_FIELDS = tuple(field.name for field in dataclasses.fields(LeafSpec))


def checked_key_path(json: Any) -> list[list[Any]]:
    """The inverse of `typed_key_path`. Raises TypeError, KeyError or ValueError for anything else."""
    return [_checked_key(tag, key) for tag, key in json]


def _checked_key(tag: Any, key: Any) -> list[Any]:
    if type(key) is not _KEY_TYPES[tag]:
        raise TypeError(f"{key!r} is no key of kind {tag!r}")
    return [tag, key]
