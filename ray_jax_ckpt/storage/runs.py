"""Where a run keeps its checkpoints, and which are there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_manifest

logger = logging.getLogger(__name__)

FOLDER = "ray_jax_ckpt/checkpoints"
_NAME = re.compile(r"attempt-(\d+)\.(\d+)-step-(\d+)")


def checkpoint_path(run_path: str, generation: Generation) -> str:
    """Directory of a generation's checkpoint: two generations never share one, and names sort by age."""
    name = f"attempt-{generation.attempt:04d}.{generation.restores}-step-{generation.step:09d}"
    return f"{run_path.rstrip('/')}/{FOLDER}/{name}"


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


def find_checkpoints(filesystem: pyarrow.fs.FileSystem, run_path: str) -> Iterator[tuple[str, Manifest]]:
    """Paths and manifests of the checkpoints that a run has written, in no order.

    What is unfinished or damaged is passed over, with a warning if it has a manifest. Raises OSError if the storage
    cannot be read.
    """
    selector = pyarrow.fs.FileSelector(f"{run_path.rstrip('/')}/{FOLDER}", allow_not_found=True)
    for info in filesystem.get_file_info(selector):
        if info.type != pyarrow.fs.FileType.Directory:
            continue
        try:
            with filesystem.open_input_stream(f"{info.path}/{MANIFEST}") as stream:
                raw = stream.read(MAX_MANIFEST_BYTES + 1)
            yield info.path, parse_manifest(raw, f"{info.path}/{MANIFEST}")
        except FileNotFoundError:
            logger.debug("%s is unfinished.", info.path)
        except CheckpointError as error:
            logger.warning("Passed over the checkpoint %s: %s", info.path, error)
