"""Where a leaf lies in a checkpoint, so that Orbax finds it: its own rule, and what that rule cannot keep apart.

Orbax joins the keys of a leaf's path with dots and takes that as the array's directory (0.12.8, both APIs). It does not
notice when two leaves get the same one, `{"a.b": x, "a": {"b": y}}`: both come back with one's content. A key "/abs" it
writes to `/abs`. Such trees are refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_jax_ckpt.errors import UnsupportedLeafError
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.storage.manifest import FOLDER, check_path

ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "array_metadatas/process_0", "commit_success.txt")
_RESERVED = frozenset(
    {path.split("/")[0] for path in ORBAX_FILES}
    | {FOLDER, "_strings.json", "manifest.ocdbt", "d", "ocdbt_data", "ocdbt_meta", "orbax.checkpoint"}
)
_IN_ARRAY = ("c", "zarr.json")


def leaf_names(specs: Sequence[LeafSpec]) -> list[str]:
    """Directory of each leaf's array in the checkpoint; "" is the checkpoint's own.

    Raises:
        UnsupportedLeafError: Orbax has the same place for two leaves, or none that every filesystem takes.
    """
    # A slash at the end makes no difference on a filesystem.
    names = [orbax_name(spec.key_path).removesuffix("/") for spec in specs]
    taken: dict[str, LeafSpec] = {}
    for name, spec in zip(names, specs, strict=True):
        _check(name, spec)
        if name in taken:
            raise _refusal(spec, f"{_named(taken[name])} would have the same directory {name!r} in an Orbax checkpoint")
        taken[name] = spec
    for name, spec in taken.items():
        _check_around(name, spec, taken)
    return names


def orbax_name(key_path: Sequence[Sequence[Any]]) -> str:
    """Orbax's name for a leaf."""
    return ".".join(str(key) for _, key in key_path)


def _check(name: str, spec: LeafSpec) -> None:
    try:
        if name:
            check_path(name + "/zarr.json")
            name.encode()
    except ValueError as error:
        raise _refusal(spec, f"an Orbax checkpoint would keep it in a directory that cannot be: {error}") from None
    if "\\" in name:
        raise _refusal(spec, "tensorstore, with which Orbax reads, takes a backslash in a name for a slash")
    first = name.split("/")[0]
    if first in _RESERVED or first.startswith("ocdbt.process_"):
        raise _refusal(spec, f"an Orbax checkpoint has a file or directory {first!r} of its own")


def _check_around(name: str, spec: LeafSpec, taken: Mapping[str, LeafSpec]) -> None:
    """A name with slashes lies inside of others, where it must not meet their files."""
    segments = name.split("/") if name else []
    for end in range(len(segments)):
        outer = "/".join(segments[:end])
        if segments[end] in _IN_ARRAY and outer in taken:
            why = f"its directory {name!r} in an Orbax checkpoint would be among the files of {_named(taken[outer])}"
            raise _refusal(spec, why)


def _named(spec: LeafSpec) -> str:
    return spec.path or "(the whole state)"


def _refusal(spec: LeafSpec, why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(f"leaf {_named(spec)} cannot be written to storage: {why}. Rename a key on its path.")
