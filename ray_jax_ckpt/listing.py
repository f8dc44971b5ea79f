"""Which checkpoints of a run are on storage, and what is left of others: for the driver, or any machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow.fs

from ray_jax_ckpt.config import positive_s
from ray_jax_ckpt.errors import ConfigError, SnapshotTimeoutError
from ray_jax_ckpt.model.results import Policy, Status
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.chronicle import not_settled, pending_of
from ray_jax_ckpt.storage.files import remove_tree
from ray_jax_ckpt.storage.filesystem import Place, describe, is_place, join, reading, resolve
from ray_jax_ckpt.storage.inventory import problem_of
from ray_jax_ckpt.storage.manifest import MANIFEST
from ray_jax_ckpt.storage.ray_state import rebuild
from ray_jax_ckpt.storage.records import Origin, Record, State
from ray_jax_ckpt.storage.run_checkpoints import by_age
from ray_jax_ckpt.storage.run_directory import check_run
from ray_jax_ckpt.storage.runs import directories, find_unfinished
from ray_jax_ckpt.storage.state import current_state

logger = logging.getLogger(__name__)

LISTINGS = 5
POLL_S = 1.0
DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a run. `restore` takes it, if it can be restored.

    Attributes:
        path: Of its directory.
        filesystem: That this is on.
        step: The training step; None: it is not known, of what others wrote and Ray has listed.
        attempt: Which start of a worker group took it, if known.
        metrics: What `snapshot(metrics=...)` was given on rank 0, or what it was reported with.
        created_at_s: Unix time.
        status: How far it has come, such as "complete"; see `ray_jax_ckpt.model.results.Status`.
        origin: "persist": the stores wrote it. "report": it was reported to Ray.
        reason: Why it is no better than that; "" if it can be restored.
    """

    path: str
    filesystem: pyarrow.fs.FileSystem = field(repr=False)
    step: int | None
    attempt: int | None
    metrics: Mapping[str, Any]
    created_at_s: float
    status: Status = Status.COMPLETE
    origin: Origin = "persist"
    reason: str = ""


def checkpoints(
    run: Any = None,
    *,
    status: Literal["restorable", "all"] = "restorable",
    consistency: Literal["committed", "validated"] | None = None,
    timeout_s: float | None = None,
    filesystem: Any = None,
) -> list[CheckpointInfo]:
    """The checkpoints of a run on storage, oldest first: what its stores have written and what was reported to Ray.

    Any process may call it with a run, with or without Ray. In a train function any rank may call it without one, and
    is told what its run's coordinator knows; it does not wait for other ranks. Of restorable ones only those are listed
    that are there, with every file that their manifest names in its size; digests are compared when one is restored.

    Args:
        run: The run's directory, `<storage_path>/<name>`, as a path, a URI or a (path, filesystem) pair; or the
            `Result` of its `fit()`. None: the run of this train function.
        status: "restorable", or "all": also those that are being written, have failed, or are lost, with the reason.
        consistency: "committed": waits until nothing is being written, and what this worker has reported is registered.
            "validated": also until nothing is being validated. None: does not wait.
        timeout_s: Bound of that. None: two minutes.
        filesystem: Of pyarrow or fsspec, that a path is on.

    Raises:
        ConfigError: `run` is nothing of that kind, or `status`, `consistency` or `timeout_s`.
        NoCheckpointError: There is no such directory. One that is there and no run's is warned of.
        NoSessionError: `run` is None, and this is no train function of a run with a `CheckpointManager`.
        SnapshotTimeoutError: It was not as consistent in time. The message says what is pending.
        StorageError: The storage cannot be read.
        NotSupportedError: A newer version of this package has kept the run's state.
    """
    if status not in ("restorable", "all") or consistency not in (None, "committed", "validated"):
        raise ConfigError(
            f"checkpoints(status={status!r}, consistency={consistency!r}): status is 'restorable' or 'all', "
            "consistency 'committed', 'validated' or None."
        )
    bound = DEFAULT_TIMEOUT_S if timeout_s is None else positive_s(timeout_s)
    files, path, state = _of_train_function(consistency, bound) if run is None else (*_place_of(run, filesystem), None)
    with reading(f"Listing the checkpoints of {path}"):
        if state is None:
            state = _settled(files, path, consistency, bound)
        found = _looked_at(files, path, state)
    wanted = [record for record in found if status == "all" or record.status.is_restorable]
    return [_info(files, path, record) for record in wanted]


def _place_of(run: Any, filesystem: Any) -> Place:
    """Where a run is. What is no run's directory is warned of, since whoever gave it looks for something."""
    if not is_place(run):
        raise ConfigError(
            f"{run!r:.200} is no run. Give its directory, <storage_path>/<name>, as a path, a URI or a (path, "
            "filesystem) pair, or the Result of its fit()."
        )
    place = resolve(run, filesystem)
    with reading(f"Looking for the run {describe(*place)}"):
        problem = check_run(*place)
    if problem:
        logger.warning("%s", problem)
    return place


def _settled(files: pyarrow.fs.FileSystem, path: str, consistency: str | None, timeout_s: float) -> State:
    """The state of a run of which nobody is to be asked, when nothing of it is on its way any more."""
    deadline = time.monotonic() + timeout_s
    while pending := pending_of(state := current_state(files, path), consistency):
        if time.monotonic() > deadline:
            raise SnapshotTimeoutError(not_settled(pending, consistency, timeout_s))
        time.sleep(POLL_S)
    return state


def _looked_at(files: pyarrow.fs.FileSystem, path: str, state: State) -> list[Record]:
    """All records, with what is lost as such.

    A newer checkpoint may get its name, and the older one go, between a listing and a look: then both are made again.
    """
    found: list[Record] = []
    for _ in range(LISTINGS):
        before = set(directories(files, path))
        found = by_age(_checked(files, path, record) for record in state.checkpoints)
        if before == set(directories(files, path)):
            break
        state = current_state(files, path)
    return found


def _of_train_function(consistency: str | None, timeout_s: float) -> tuple[pyarrow.fs.FileSystem, str, State]:
    # A process that only lists has no use for JAX.
    from ray_jax_ckpt.worker import known_checkpoints

    place, state = known_checkpoints(consistency, timeout_s)
    if place is None:
        raise ConfigError("This run has no storage.")
    return *place, state


def _checked(files: pyarrow.fs.FileSystem, run_path: str, record: Record) -> Record:
    problem = problem_of(files, join(run_path, record.path)) if record.status.is_restorable else ""
    return record.model_copy(update={"status": Status.LOST, "reason": problem}) if problem else record


def _info(files: pyarrow.fs.FileSystem, run_path: str, record: Record) -> CheckpointInfo:
    attempt = Generation.parse(record.generation).attempt if record.generation else None
    known = record.step, attempt, record.metrics, record.created_at_s
    return CheckpointInfo(join(run_path, record.path), files, *known, record.status, record.origin, record.reason)


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
        NoCheckpointError: There is no such directory.
        StorageError: The storage cannot be read, or does not let them go.
    """
    files, path = _place_of(run, filesystem)
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
        ConfigError: `run` is nothing of that kind, or the score is none.
        NoCheckpointError: There is no such directory.
        StorageError: The storage cannot be read, or does not take the file.
    """
    if score_order not in ("max", "min") or not isinstance(score_attribute, str | None):
        raise ConfigError(
            f"rebuild_ray_state(score_attribute={score_attribute!r}, score_order={score_order!r}): score_attribute is "
            "the name of a metric or None, score_order 'max' or 'min'."
        )
    files, path = _place_of(run, filesystem)
    known = current_state(files, path).checkpoints
    policy = Policy(None, score_attribute, score_order)
    with reading(f"Making Ray's list of {path} anew"):
        found = rebuild(files, path, known, policy)
    return [join(path, record.path) for record in found or ()]
