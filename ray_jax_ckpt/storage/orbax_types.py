"""What Orbax takes each leaf for, and what it has no type for. Decided without Orbax, since stores decide it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.storage.names import orbax_name
from ray_jax_ckpt.storage.zarr import as_scalar, is_known
from ray_jax_ckpt.values import decode_value

OrbaxType = Literal["jax.Array", "np.ndarray", "scalar", "string", "None"]
"""As `_METADATA` calls them. What Orbax has no type for is None to it: left out, it would move other elements of its
list, and no plain `load` of the rest would work."""


def orbax_types(specs: Sequence[LeafSpec], values: Mapping[int, Any]) -> list[OrbaxType]:
    """The type of each leaf, in tree order.

    Args:
        specs: Of all leaves.
        values: Of the leaves of kind "value", encoded: an int may be too large for Orbax, a str no Unicode.
    """
    texts = {i: text for i, value in values.items() if (text := _text(value)) is not None}
    _, lost = place_strings({i: (orbax_name(specs[i].key_path), text) for i, text in texts.items()})
    found: list[OrbaxType] = []
    for number, spec in enumerate(specs):
        if number in texts:
            found.append("None" if number in lost else "string")
        elif spec.kind == "value":
            found.append(_of_number(values[number]))
        elif not is_known(spec.dtype):
            found.append("None")
        else:
            found.append("np.ndarray" if spec.kind == "numpy" else "jax.Array")
    return found


def _of_number(encoded: Any) -> OrbaxType:
    array = as_scalar(encoded)
    if array is None:
        return "None"
    # As scalars bool and ml_dtypes' floats would make `v1.metadata` of the whole checkpoint fail (0.12.8, its own too).
    # As arrays they come back equal, and with a template of their type also in it.
    return "scalar" if array.dtype.kind in "iuf" else "np.ndarray"


def place_strings(strings: Mapping[int, tuple[str, str]]) -> tuple[dict[str, Any], set[int]]:
    """The contents of `_strings.json`, and the numbers of leaves that Orbax could not look up in it.

    Orbax looks a string up by the JSON pointer "/" + name (RFC 6901), so a slash in a name nests, "~0" and "~1" stand
    for "~" and "/", and a name with another "~" can be neither written nor read.

    Args:
        strings: Orbax's name and the text, by number of the leaf.
    """
    tree: dict[str, Any] = {}
    lost = set()
    for number, (name, text) in strings.items():
        keys = name.split("/")
        legal = all("~" not in key.replace("~0", "").replace("~1", "") for key in keys)
        if not (legal and _is_unicode(text) and _put(tree, [_unescaped(key) for key in keys], text)):
            lost.add(number)
    return tree, lost


def strings_of(specs: Sequence[LeafSpec], types: Sequence[OrbaxType], values: Mapping[int, Any]) -> dict[str, Any]:
    """The contents of `_strings.json`."""
    chosen = [number for number, kind in enumerate(types) if kind == "string"]
    tree, _ = place_strings({i: (orbax_name(specs[i].key_path), str(_text(values[i]))) for i in chosen})
    return tree


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def _put(tree: dict[str, Any], keys: Sequence[str], text: str) -> bool:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return False
    if keys[-1] in node:
        return False
    node[keys[-1]] = text
    return True


def _text(encoded: Any) -> str | None:
    value = decode_value(encoded)
    return str(value) if isinstance(value, str) else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
