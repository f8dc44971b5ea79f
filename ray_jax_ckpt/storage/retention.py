"""Removing older steps when a new one is complete."""

from __future__ import annotations

import pyarrow.fs

from ray_jax_ckpt.storage.files import TEMPORARY, exists, remove_tree
from ray_jax_ckpt.storage.filesystem import Place, join
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST
from ray_jax_ckpt.storage.steps import step_name, step_of


def surplus(steps: set[int], *, just_written: int, keep: int | None) -> list[int]:
    """The steps to be removed: the lowest ones, and never the one that was just written.

    Args:
        steps: That are complete.
        just_written: One of them.
        keep: How many are to be left. None: all.
    """
    if keep is None:
        return []
    others = sorted(steps - {just_written})
    return others[: max(0, len(others) + 1 - keep)]


def prune(place: Place, *, just_written: int, keep: int | None) -> list[str]:
    """Removes surplus steps of this package, and what was left of lower ones that were never finished.

    Returns:
        The paths of what was removed.

    Raises:
        OSError: Storage failed; what was to be removed may be there still.
    """
    filesystem, base = place
    complete, unfinished = _listed(place)
    doomed = [join(base, step_name(step)) for step in surplus(complete, just_written=just_written, keep=keep)]
    doomed += [path for step, path in unfinished if step < just_written]
    for path in doomed:
        remove_tree(filesystem, path, first=MANIFEST)
    return doomed


def is_finished(place: Place) -> bool:
    """Whether a directory is not one that this package began to write and did not finish."""
    filesystem, path = place
    return exists(filesystem, join(path, MANIFEST)) or not exists(filesystem, join(path, FOLDER))


def _listed(place: Place) -> tuple[set[int], list[tuple[int, str]]]:
    """Complete steps, and (step, path) of unfinished ones. Of this package: others' are theirs to remove."""
    filesystem, base = place
    complete, unfinished = set(), []
    for info in filesystem.get_file_info(pyarrow.fs.FileSelector(base)):
        name = info.base_name.removesuffix(TEMPORARY)
        step = step_of(name)
        path = join(base, info.base_name)
        if info.type != pyarrow.fs.FileType.Directory or step is None or name != step_name(step):
            continue
        if name != info.base_name:
            unfinished.append((step, path))
        elif exists(filesystem, join(path, MANIFEST)):
            complete.add(step)
        elif exists(filesystem, join(path, FOLDER)):
            unfinished.append((step, path))
    return complete, unfinished
