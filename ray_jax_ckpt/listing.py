"""Which checkpoints of a run are on storage, and what is left of others: for the driver, or any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow.fs

from ray_jax_ckpt.model.results import Policy
from ray_jax_ckpt.storage.files import remove_tree
from ray_jax_ckpt.storage.filesystem import join, reading, resolve
from ray_jax_ckpt.storage.manifest import MANIFEST, Manifest
from ray_jax_ckpt.storage.ray_state import rebuild
from ray_jax_ckpt.storage.reader import lacking
from ray_jax_ckpt.storage.runs import directories, find_checkpoints, find_unfinished
from ray_jax_ckpt.storage.state import StateFile

LISTINGS = 5


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that the stores of a run have written. `restore` takes it.

    Attributes:
        path: Of its directory.
        filesystem: That this is on.
        step: The training step.
        attempt: Which start of a worker group took it.
        metrics: What `snapshot(metrics=...)` was given on rank 0.
        created_at_s: Unix time.
    """

    path: str
    filesystem: pyarrow.fs.FileSystem = field(repr=False)
    step: int
    attempt: int
    metrics: Mapping[str, Any]
    created_at_s: float


def checkpoints(run: Any, *, filesystem: Any = None) -> list[CheckpointInfo]:
    """The checkpoints that the stores of a run have written (`PersistConfig`), oldest first; the last is the newest.

    Any process may call it, with or without Ray. Only those are listed that have a manifest and every file that it
    names in its size; digests are compared when one is restored. What was reported to Ray is in Ray's `Result` instead.

    Args:
        run: The run's directory, `<storage_path>/<name>`, as a path, a URI or a (path, filesystem) pair; or the
            `Result` of its `fit()`.
        filesystem: Of pyarrow or fsspec, that a path is on.

    Raises:
        ConfigError: `run` is nothing of that kind.
        StorageError: The storage cannot be read.
    """
    files, path = resolve(run, filesystem)
    with reading(f"Listing the checkpoints of {path}"):
        found = _whole(files, path)
    ordered = sorted(found, key=lambda pair: pair[1].generation)
    return [
        CheckpointInfo(where, files, one.step or 0, one.attempt, one.metrics.get(0, {}), one.created_at_s)
        for where, one in ordered
    ]


def _whole(files: pyarrow.fs.FileSystem, path: str) -> list[tuple[str, Manifest]]:
    """A newer one may get its name, and the older one go, between a listing and a look at it: then it is made again."""
    found: list[tuple[str, Manifest]] = []
    for _ in range(LISTINGS):
        before = set(directories(files, path))
        found = [(where, one) for where, one in find_checkpoints(files, path) if not lacking(files, where, one)]
        if len(found) == len(before) or before == set(directories(files, path)):
            break
    return found


def remove_unfinished(run: Any, *, dry_run: bool = True, filesystem: Any = None) -> list[str]:
    """Removes what writers that were killed have left of a run's checkpoints. The run must not be going on.

    What is complete stays.

    Args:
        run: As for `checkpoints`.
        dry_run: Whether nothing is removed.
        filesystem: Of pyarrow or fsspec, that a path is on.

    Returns:
        The directories that are, or would be, removed.

    Raises:
        ConfigError: `run` is nothing of that kind.
        StorageError: The storage cannot be read, or does not let them go.
    """
    files, path = resolve(run, filesystem)
    with reading(f"Removing what is unfinished of {path}"):
        found = sorted(find_unfinished(files, path))
        for where in () if dry_run else found:
            remove_tree(files, where, first=MANIFEST)
    return found


def rebuild_ray_state(
    run: Any,
    *,
    score_attribute: str | None = None,
    score_order: Literal["max", "min"] = "max",
    filesystem: Any = None,
) -> list[str]:
    """Makes Ray's own list of reported checkpoints anew, `checkpoint_manager_snapshot.json`, where Ray would refuse it.

    Ray ends a run before its first worker starts if that file is damaged or names a checkpoint that is gone, and later
    if it has a null for the score by which it ranks (which is what it makes of a NaN). What is listed anew are the
    reported checkpoints of this package that are whole; of a list that can be read, what is there of it. The old file
    is kept beside the new one. The run must not be going on. Nothing is changed if nothing is wrong.

    Args:
        run: As for `checkpoints`.
        score_attribute: As in the run's `CheckpointConfig(checkpoint_score_attribute=...)`: Ray keeps its list sorted.
        score_order: As in its `checkpoint_score_order`.
        filesystem: Of pyarrow or fsspec, that a path is on.

    Returns:
        The directories of what was listed anew, worst first; none if nothing was wrong.

    Raises:
        ConfigError: `run` is nothing of that kind.
        StorageError: The storage cannot be read, or does not take the file.
    """
    files, path = resolve(run, filesystem)
    known = StateFile(files, path).load().state.checkpoints
    policy = Policy(None, score_attribute, score_order)
    with reading(f"Making Ray's list of {path} anew"):
        found = rebuild(files, path, known, policy)
    return [join(path, record.path) for record in found or ()]
