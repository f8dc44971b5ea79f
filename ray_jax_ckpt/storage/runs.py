"""Where a run keeps its checkpoints, and which are there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.files import TEMPORARY, exists
from ray_jax_ckpt.storage.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_manifest

logger = logging.getLogger(__name__)

FOLDER = "ray_jax_ckpt/checkpoints"
_NAME = re.compile(r"attempt-(\d{4,18})\.(\d{1,18})-step-(\d{9,18})")


def checkpoint_path(run_path: str, generation: Generation) -> str:
    """Directory of a generation's checkpoint: two generations never share one, and names sort by age."""
    name = f"attempt-{generation.attempt:04d}.{generation.restores}-step-{generation.step:09d}"
    return f"{run_path.rstrip('/')}/{FOLDER}/{name}"


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
    selector = pyarrow.fs.FileSelector(f"{run_path.rstrip('/')}/{FOLDER}", allow_not_found=True)
    for info in filesystem.get_file_info(selector):
        name = info.base_name.removesuffix(TEMPORARY).removesuffix(".old")
        found = _NAME.fullmatch(name)
        if info.type != pyarrow.fs.FileType.Directory or found is None:
            continue
        if older_than is not None and Generation(*map(int, found.groups())) >= older_than:
            continue
        if name != info.base_name or not exists(filesystem, f"{info.path}/{MANIFEST}"):
            yield info.path
