"""Checkpoints of several steps in one directory: `ckpt-<step>` of this package, `<step>` of Orbax's manager."""

from __future__ import annotations

import re

import pyarrow.fs as pafs

from ray_jax_ckpt.storage.filesystem import describe
from ray_jax_ckpt.storage.spares import named
from ray_jax_ckpt.storage.streams import Deadline, ask

UNNUMBERED = "checkpoint"
"""Directory of a checkpoint that was saved without a step."""
_STEP = re.compile(r"(?:(?:ckpt|checkpoint|step)[-_])?(\d{1,18})")
# Ray numbers reports so, not training steps.
_RAY = re.compile(r"checkpoint_\d{6}")


def step_name(step: int) -> str:
    """Directory of a step."""
    return f"ckpt-{step}"


def step_of(path: str) -> int | None:
    """The step that the name of a directory says, such as "ckpt-7", "7", "step_7"."""
    name = path.rstrip("/").rpartition("/")[2]
    found = _STEP.fullmatch(name)
    return None if found is None or _RAY.fullmatch(name) else int(found[1])


def list_steps(filesystem: pafs.FileSystem, path: str, deadline: Deadline | None = None) -> dict[int, str]:
    """Names of directories that stand for a step, by step, in ascending order; none if there is no such directory.

    Whether one holds a whole checkpoint, or only its spare is there, is not looked at. Where two stand for the same
    step, "ckpt-" comes first.
    """
    selector, what = pafs.FileSelector(path, allow_not_found=True), f"Listing {describe(filesystem, path)}"
    listed = ask(lambda: filesystem.get_file_info(selector), what, deadline)
    found: dict[int, str] = {}
    names = {named(info.base_name) for info in listed if info.type == pafs.FileType.Directory}
    for name in sorted(names, reverse=True):
        step = step_of(name)
        if step is not None and found.get(step) != step_name(step):
            found[step] = name
    return dict(sorted(found.items()))
