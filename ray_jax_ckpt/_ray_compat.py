"""Everything that this package takes from Ray Train's internals, in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow.fs
from ray.exceptions import RayActorError
from ray.train._internal.session import _TrainingResult as TrainingResult
from ray.train._internal.utils import get_address_and_port
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError, WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.jax.config import _JaxBackend as RayJaxBackend

from ray_jax_ckpt.model.choice import crash_kind

__all__ = [
    "CheckpointManagerInitializationError",
    "ControllerCallback",
    "RayJaxBackend",
    "ReportCallback",
    "TrainingResult",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "callbacks_of",
    "crash_of",
    "dead_ranks",
    "disown_started_state",
    "ended_well",
    "failures_of",
    "filesystem_maker",
    "get_address_and_port",
    "group",
    "max_failures",
    "num_nodes_of",
    "preemption_grace_s",
    "preemption_of",
    "run_location",
    "run_path",
    "scaling_config_of",
    "score_attribute",
    "set_checkpoint",
    "storage_filesystem",
    "world_rank",
]


# What Ray says of an actor that has died with its node, in a text only (2.60).
NODE_DIED = "its node has died"


def storage_filesystem(train_run_context: Any) -> pyarrow.fs.FileSystem:
    """The filesystem that the run's directory is on."""
    return train_run_context.run_config.storage_context.storage_filesystem


def filesystem_maker(train_run_context: Any) -> Callable[[], pyarrow.fs.FileSystem] | None:
    """Makes the run's filesystem anew from its URI; None if it was given as an object, or has no URI."""
    config = train_run_context.run_config
    if config.storage_filesystem is not None or "://" not in str(config.storage_path):
        return None
    return functools.partial(_from_uri, str(config.storage_path))


def _from_uri(uri: str) -> pyarrow.fs.FileSystem:
    return pyarrow.fs.FileSystem.from_uri(uri)[0]


def run_path(train_run_context: Any) -> str:
    """The run's directory on its filesystem."""
    return train_run_context.run_config.storage_context.experiment_fs_path


def run_location(name: str, storage_path: str, filesystem: Any) -> tuple[pyarrow.fs.FileSystem, str]:
    """Where a run with these settings of RunConfig has its directory. Nothing is written."""
    context = StorageContext(storage_path, name, storage_filesystem=filesystem, read_only=True)
    return context.storage_filesystem, context.experiment_fs_path


def callbacks_of(train_run_context: Any) -> list[Any]:
    """The callbacks of RunConfig."""
    return list(getattr(train_run_context.run_config, "callbacks", None) or [])


def max_failures(train_run_context: Any) -> int:
    """How often Ray restarts the worker group; negative for any number of times."""
    return train_run_context.run_config.failure_config.max_failures


def failures_of(poll_status: Any) -> dict[int, str]:
    """What Ray's poll says of failed ranks."""
    return {rank: f"{type(error).__name__}: {error}" for rank, error in poll_status.errors.items()}


def crash_of(poll_status: Any) -> tuple[str, ...]:
    """The kinds of errors that ranks have failed with; of those that went with their nodes none."""
    kinds: set[str] = set()
    for error in poll_status.errors.values():
        cause = getattr(error, "health_check_failure", error)
        if not isinstance(cause, RayActorError):
            kinds.add(crash_kind(f"{type(error).__name__}: {error}"))
        elif NODE_DIED not in str(cause):
            kinds.add("its process died")
    return tuple(sorted(kinds))


def dead_ranks(poll_status: Any) -> list[int]:
    """Ranks whose process is gone, by Ray's poll. One whose train function raised still has its process."""
    return sorted(
        rank
        for rank, error in poll_status.errors.items()
        if isinstance(getattr(error, "health_check_failure", error), RayActorError)
    )


def preemption_of(poll_status: Any) -> tuple[tuple[int, ...], int] | None:
    """Ranks whose nodes are going to be taken away, with what fails together with them, and the deadline.

    Ray's watcher tells the workers and the poll brings it back. In milliseconds since the epoch, 0 without a deadline.
    `ray.train.get_preemption_info()`, which says the same, is a barrier of all ranks: nothing here may call it.
    """
    info = poll_status.get_preemption_info()
    return None if info is None else (tuple(info.preempted_ranks), info.deadline_ms or 0)


def preemption_grace_s(worker_group: Any) -> float:
    """How long the survivors of a preemption may go on after the deadline, 0 where this Ray does not say."""
    config = getattr(getattr(worker_group, "_train_run_context", None), "run_config", None)
    return float(getattr(getattr(config, "failure_config", None), "preemption_grace_s", 0.0) or 0.0)


def world_rank() -> int:
    """This worker's rank."""
    return get_train_context().get_world_rank()


def group() -> tuple[int, int] | None:
    """Rank and number of workers of the group that this process is a worker of; None if it is none."""
    try:
        context = get_train_context()
    except RuntimeError:
        return None
    return context.get_world_rank(), context.get_world_size()


def score_attribute() -> str | None:
    """The metric that Ray ranks the checkpoints of this worker's run by; None: none, or this is no worker."""
    try:
        config: Any = get_train_context().train_run_context.run_config
    except (AttributeError, RuntimeError):
        return None
    return getattr(getattr(config, "checkpoint_config", None), "checkpoint_score_attribute", None)


def set_checkpoint(checkpoint: Any) -> Any:
    """Replaces what `ray.train.get_checkpoint()` returns in this worker; returns what it would have returned."""
    context = get_train_context()
    with context.report_order_condition:
        before, context.checkpoint = context.checkpoint, checkpoint
    return before


def scaling_config_of(worker_group: Any) -> Any:
    """The run's ScalingConfig, None where this Ray keeps it elsewhere."""
    return getattr(getattr(worker_group, "_train_run_context", None), "scaling_config", None)


def num_nodes_of(worker_group: Any) -> int:
    """How many nodes hold workers of the group."""
    return len({worker.metadata.node_id for worker in worker_group.get_workers()})


def ended_well(worker_group: Any) -> bool:
    """Whether every worker's train function has returned, by the controller's latest poll.

    False for a failure, and also for a group that is resized or preempted: its workers are still in their train
    function and are killed next.
    """
    status = worker_group.get_latest_poll_status()
    return status is not None and bool(status.finished) and not status.errors


def disown_started_state(worker_group: Any) -> None:
    """Let a group whose start fails in our hook be cleaned up by Ray.

    WorkerGroup._start cleans up only a group that has not started, and a group counts as started before the start hooks
    run. So a worker that dies in them would leave the placement group and the other workers behind, and on a cluster
    without spare resources the next attempt would wait for them for ever.
    """
    if hasattr(worker_group, "_worker_group_state"):
        worker_group._worker_group_state = None
