"""Whether a directory is a run's, and what to say of one that is not."""

from __future__ import annotations

import re

import pyarrow.fs

from ray_jax_ckpt.errors import NoCheckpointError
from ray_jax_ckpt.storage.filesystem import describe, directory_names, join
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST
from ray_jax_ckpt.storage.runs import FOLDER as CHECKPOINTS

RAY_STATE = "checkpoint_manager_snapshot.json"
STATE = f"{FOLDER}/state.json"
PREVIOUS = f"{FOLDER}/state.previous.json"
_MARKS = (STATE, PREVIOUS, CHECKPOINTS, f"{FOLDER}/events.jsonl", RAY_STATE)
RUN_IS = "A run's directory is <storage_path>/<name>, as in its RunConfig."
# Names that Ray gives to what is reported. Those of older versions, checkpoint_000007, may be another program's steps.
_REPORTED = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_.+")
_MAX_BELOW = 64


def is_run(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Whether a run has left its state, its log or a checkpoint in a directory. Raises OSError."""
    if _is_marked(filesystem, path):
        return True
    return any(_REPORTED.fullmatch(name) for name in directory_names(filesystem, path))


def check_run(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """What is wrong with a path that is given as a run's directory; "" if nothing is.

    Raises:
        NoCheckpointError: There is no directory.
        OSError: Storage failed.
    """
    where, kind = describe(filesystem, path), filesystem.get_file_info(path).type
    if kind != pyarrow.fs.FileType.Directory:
        found = "it is a file" if kind == pyarrow.fs.FileType.File else "it does not exist"
        raise NoCheckpointError(f"{where} is no directory of a run: {found}. {RUN_IS}")
    if is_run(filesystem, path):
        return ""
    if filesystem.get_file_info(join(path, MANIFEST)).type == pyarrow.fs.FileType.File:
        return f"{where} is a checkpoint, and no directory of a run: nothing is listed below it. {RUN_IS}"
    nothing = "no state, log or checkpoint of one is in it"
    return f"{where} is no directory of a run: {nothing}. {RUN_IS}{hint(filesystem, path)}"


def hint(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Which runs are below a directory, in words. Raises OSError."""
    found = runs_below(filesystem, path)
    return f" There are runs below it: {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}." if found else ""


def runs_below(filesystem: pyarrow.fs.FileSystem, path: str) -> list[str]:
    """Names of the directories in a directory that are runs', as far as a short look tells. Raises OSError."""
    names = sorted(directory_names(filesystem, path))[:_MAX_BELOW]
    return [name for name in names if _is_marked(filesystem, join(path, name))]


def _is_marked(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    infos = filesystem.get_file_info([join(path, mark) for mark in _MARKS])
    return any(info.type != pyarrow.fs.FileType.NotFound for info in infos)
