"""Removing older steps when a new one is complete."""

from __future__ import annotations

import pyarrow.fs

from ray_jax_ckpt.storage.files import TEMPORARY, exists, remove_tree
from ray_jax_ckpt.storage.filesystem import Place, join
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST
from ray_jax_ckpt.storage.spares import named, put_back, remove_with_spare, standing
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

    Steps whose replacement was cut short get one directory under their own name again, where that can be renamed.

    Returns:
        The paths of what was removed.

    Raises:
        OSError: Storage failed; what was to be removed may be there still.
    """
    filesystem, base = place
    _settle(place)
    complete, unfinished = _listed(place)
    doomed = [join(base, step_name(step)) for step in surplus(complete, just_written=just_written, keep=keep)]
    left = [path for step, path in unfinished if step < just_written]
    for path in doomed:
        remove_with_spare(filesystem, path)
    for path in left:
        remove_tree(filesystem, path, first=MANIFEST)
    return [*doomed, *left]


def _listed(place: Place) -> tuple[set[int], list[tuple[int, str]]]:
    """Complete steps, and (step, path) of what is left of others. Of this package: others' are theirs to remove."""
    filesystem, base = place
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(base))
    names = {info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory}
    complete, unfinished = set(), []
    for name in sorted(names):
        final = named(name).removesuffix(TEMPORARY)
        step, path = step_of(final), join(base, name)
        if step is None or final != step_name(step):
            continue
        if name == f"{final}{TEMPORARY}":
            unfinished.append((step, path))
        elif exists(filesystem, f"{path}/{MANIFEST}"):
            complete.add(step)
        elif exists(filesystem, f"{path}/{FOLDER}"):
            unfinished.append((step, path))
    return complete, unfinished


def _settle(place: Place) -> None:
    """Ends what somebody who was killed while he replaced a checkpoint has begun."""
    filesystem, base = place
    for info in filesystem.get_file_info(pyarrow.fs.FileSelector(base)):
        path = join(base, info.base_name)
        if named(path) == path or step_of(named(path)) is None:
            continue
        put_back(filesystem, named(path))
        if standing(filesystem, named(path)) == named(path):
            remove_tree(filesystem, path, first=MANIFEST)
