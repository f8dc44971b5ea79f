"""Everything that this package takes from Ray Train's internals, in one place."""

from __future__ import annotations

from typing import Any

import pyarrow.fs
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context

__all__ = [
    "ControllerCallback",
    "ReportCallback",
    "WorkerGroupCallback",
    "failures_of",
    "in_train_worker",
    "max_failures",
    "run_path",
    "set_checkpoint",
    "storage_filesystem",
    "world_rank",
]


def storage_filesystem(train_run_context: Any) -> pyarrow.fs.FileSystem:
    """The filesystem that the run's directory is on."""
    return train_run_context.run_config.storage_context.storage_filesystem


def run_path(train_run_context: Any) -> str:
    """The run's directory on its filesystem."""
    return train_run_context.run_config.storage_context.experiment_fs_path


def max_failures(train_run_context: Any) -> int:
    """How often Ray restarts the worker group; negative for any number of times."""
    return train_run_context.run_config.failure_config.max_failures


def failures_of(poll_status: Any) -> dict[int, str]:
    """What Ray's poll says of failed ranks."""
    return {rank: f"{type(error).__name__}: {error}" for rank, error in poll_status.errors.items()}


def in_train_worker() -> bool:
    """Whether this process is a Ray Train worker with a train context."""
    try:
        get_train_context()
    except RuntimeError:
        return False
    return True


def world_rank() -> int:
    """This worker's rank."""
    return get_train_context().get_world_rank()


def set_checkpoint(checkpoint: Any) -> Any:
    """Replaces what `ray.train.get_checkpoint()` returns in this worker; returns what it would have returned."""
    context = get_train_context()
    with context.report_order_condition:
        before, context.checkpoint = context.checkpoint, checkpoint
    return before
