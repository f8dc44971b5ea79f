"""Ray's own storage context on a directory, and checkpoints in it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.train import Checkpoint, CheckpointConfig
from ray.train._internal.session import _TrainingResult
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport


@pytest.fixture
def context(tmp_path: Path) -> StorageContext:
    return StorageContext(tmp_path, "run")


@pytest.fixture
def list_of_ray(context: StorageContext) -> Callable[..., None]:
    """Has Ray's own manager list results, the last of them as still to be validated."""

    def write(results: Sequence[Any], config: CheckpointConfig | None = None) -> None:
        async def report() -> None:
            manager = CheckpointManager(config or CheckpointConfig(), context)
            for number, one in enumerate(results, 1):
                pending = number == len(results)
                manager.register_checkpoint(_TrainingReport(one.checkpoint, dict(one.metrics), pending))

        with warnings.catch_warnings():
            # It asks pydantic in a way that is out of date.
            warnings.simplefilter("ignore")
            asyncio.run(report())

    return write


@pytest.fixture
def result_of(context: StorageContext) -> Callable[..., Any]:
    """Makes a result with a directory of somebody's files."""

    def make(number: int, **metrics: Any) -> Any:
        path = Path(context.experiment_fs_path, f"checkpoint_{number:03d}")
        path.mkdir(exist_ok=True)
        (path / "model.bin").write_bytes(b"x" * number)
        return _TrainingResult(Checkpoint(str(path), context.storage_filesystem), metrics or {"score": number})

    return make
