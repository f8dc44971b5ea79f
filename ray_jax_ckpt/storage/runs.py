"""Where a run keeps its checkpoints, and which are there."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pyarrow.fs

from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.files import TEMPORARY, exists
from ray_jax_ckpt.storage.filesystem import with_names
from ray_jax_ckpt.storage.manifest import MANIFEST

FOLDER = "ray_jax_ckpt/checkpoints"
_NAME = re.compile(r"attempt-(\d{4,18})\.(\d{1,18})-step-(\d{9,18})(?:-[0-9a-f]{8})?")


def checkpoint_path(run_path: str, generation: Generation) -> str:
    """Directory for a try to write a generation's checkpoint. Names sort by age.

    No two tries share one: what a filesystem has kept waiting goes on when its try has been given up, and would then
    cut off or remove files of the next one, which has its manifest by then.
    """
    name = f"attempt-{generation.attempt:04d}.{generation.restores}-step-{generation.step:09d}-{uuid.uuid4().hex[:8]}"
    return f"{run_path.rstrip('/')}/{FOLDER}/{name}"


def directories(filesystem: pyarrow.fs.FileSystem, run_path: str) -> list[str]:
    """Paths of the directories of a run's checkpoints, also of unfinished ones. Raises OSError."""
    selector = pyarrow.fs.FileSelector(f"{run_path.rstrip('/')}/{FOLDER}", allow_not_found=True)
    try:
        found = filesystem.get_file_info(selector)
    except FileNotFoundError:
        return []
    return [info.path.rstrip("/") for info in with_names(found) if info.type == pyarrow.fs.FileType.Directory]


def is_temporary(path: str) -> bool:
    """Whether a directory's name says that it is being written."""
    return path.endswith(TEMPORARY)


def is_named_here(path: str) -> bool:
    """Whether a directory has a name that this package gives, finished or not."""
    return bool(_age(_final(path)))


def _final(path: str) -> str:
    """The name that a directory has when it is a checkpoint."""
    return path.removesuffix(TEMPORARY).removesuffix(".old")


def newest_first(filesystem: pyarrow.fs.FileSystem, path: str) -> list[str]:
    """Directories of checkpoints, finished or not, of the run whose directory, or whose `FOLDER`, this is."""
    for place in (f"{path.rstrip('/')}/{FOLDER}", path.rstrip("/")):
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(place, allow_not_found=True))
        found = [info.path for info in infos if _NAME.fullmatch(info.base_name)]
        if found:
            return sorted(found, key=_age, reverse=True)
    return []


def _age(path: str) -> tuple[int, ...]:
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return tuple(map(int, found.groups())) if found else ()


def find_unfinished(
    filesystem: pyarrow.fs.FileSystem, run_path: str, older_than: Generation | None = None
) -> Iterator[str]:
    """Paths of what writers that were killed, or removals that were cut short, have left of a run's checkpoints.

    They have no manifest, or not their own name yet. What has a name that this package does not give is not looked at.

    Args:
        filesystem: Where the run is.
        run_path: Its directory.
        older_than: What is as new, or newer, may still be under way. None: nothing is.
    """
    for path in directories(filesystem, run_path):
        age = _age(_final(path))
        if not age or (older_than is not None and Generation(*age) >= older_than):
            continue
        if _final(path) != path or not exists(filesystem, f"{path}/{MANIFEST}"):
            yield path
