"""What stands in for a checkpoint while another one takes its place, so that one of the two can be had at any moment.

Where a directory is renamed, the old checkpoint is moved aside until the new one has its name. Elsewhere files would be
replaced one by one, so the new one is written aside first, and once more in its place when it is whole there. Whoever
is killed on the way leaves what is aside: it is read as long as there is nothing whole under the name itself.
"""

from __future__ import annotations

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.storage.files import TEMPORARY, exists, remove_tree, renames
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST, MAX_MANIFEST_BYTES, parse_manifest

_SUFFIX = f".old{TEMPORARY}"


def spare(path: str) -> str:
    """The directory that may stand in for the one of a checkpoint."""
    return f"{path}{_SUFFIX}"


def named(path: str) -> str:
    """The directory that a path stands in for: of any other path itself."""
    return path.removesuffix(_SUFFIX)


def standing(filesystem: pyarrow.fs.FileSystem, path: str) -> str | None:
    """Where the checkpoint of a path is: there, or in its spare. None: nowhere is one that was finished.

    Whether it is undamaged is not looked at.
    """
    # A bucket has no neighbours.
    places = (path, spare(path)) if "/" in path.strip("/") else (path,)
    infos = filesystem.get_file_info([f"{place}/{MANIFEST}" for place in places])
    found = [place for place, info in zip(places, infos, strict=True) if info.type != pyarrow.fs.FileType.NotFound]
    # Where files are no objects that come at once, the manifest itself may have been cut off.
    if len(found) == 2 and not renames(filesystem) and not _parses(filesystem, f"{path}/{MANIFEST}"):
        return spare(path)
    if found:
        return found[0]
    # Other programs have no manifest, and this package begins with its folder.
    return next((p for p in places if exists(filesystem, p) and not exists(filesystem, f"{p}/{FOLDER}")), None)


def _parses(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    with filesystem.open_input_stream(path) as stream:
        raw = stream.read(MAX_MANIFEST_BYTES + 1)
    try:
        parse_manifest(raw, path)
    except CheckpointError:
        return False
    return True


def put_back(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Gives what stands in for a missing directory its name, where it can be renamed. Raises OSError."""
    if renames(filesystem) and not exists(filesystem, path) and exists(filesystem, spare(path)):
        filesystem.move(spare(path), path)


def remove_with_spare(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Removes a checkpoint. Its spare goes first: it would stand in for what is gone. Raises OSError."""
    for place in (spare(path), path):
        remove_tree(filesystem, place, first=MANIFEST)
