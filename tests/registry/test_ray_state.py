"""Ray's own list, made anew where Ray refuses it."""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.train import CheckpointConfig
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

import ray_jax_ckpt as rjc

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from written import hold, write

# Ray's manager asks pydantic in ways that are out of date.
pytestmark = pytest.mark.filterwarnings("ignore:The `:DeprecationWarning")

BY_SCORE = CheckpointConfig(checkpoint_score_attribute="score")
MAKE = Callable[..., Any]


@pytest.fixture
def ours(context: StorageContext, result_of: MAKE, list_of_ray: MAKE) -> list[Any]:
    """Three reported checkpoints of this package, that Ray lists."""
    found = []
    for number, score in enumerate([3.0, math.nan, 1.0]):
        one = result_of(number, score=score)
        shutil.rmtree(one.checkpoint.path)
        write(hold({"w": np.arange(4.0)}, metrics={"score": score}), one.checkpoint.path, run="run", step=number)
        found.append(one)
    list_of_ray(found, BY_SCORE)
    return found


def rays_list(context: StorageContext) -> Path:
    return Path(context.checkpoint_manager_snapshot_path)


def loaded_by_ray(context: StorageContext) -> CheckpointManager:
    return CheckpointManager(BY_SCORE, context)


def listed(manager: CheckpointManager) -> list[str]:
    return [one.checkpoint.path[-1] for one in manager._checkpoint_results]


def test_a_damaged_list_is_made_anew_from_what_is_there(context: StorageContext, ours: list[Any], result_of: MAKE):
    raw = rays_list(context).read_bytes()
    rays_list(context).write_bytes(raw[:-30])
    Path(ours[0].checkpoint.path, "w", "zarr.json").unlink()
    result_of(7)
    with pytest.raises(CheckpointManagerInitializationError):
        loaded_by_ray(context)
    found = rjc.rebuild_ray_state(context.experiment_fs_path, score_attribute="score")
    assert found == [ours[1].checkpoint.path, ours[2].checkpoint.path]
    manager = loaded_by_ray(context)
    assert listed(manager) == ["1", "2"]
    assert manager.latest_checkpoint_result.checkpoint.path == ours[2].checkpoint.path
    assert manager._current_report_index == 3
    [kept] = rays_list(context).parent.glob("checkpoint_manager_snapshot.damaged-*.json")
    assert kept.read_bytes() == raw[:-30]
    # Ray goes on with it: the score that is none is no null.
    report_to(manager, result_of(8, score=2.0))
    assert listed(manager) == ["1", "2", "8"]
    assert rjc.rebuild_ray_state(context.experiment_fs_path) == []


def report_to(manager: CheckpointManager, result: Any) -> None:
    async def report() -> None:
        manager.register_checkpoint(_TrainingReport(result.checkpoint, result.metrics, False))

    asyncio.run(report())


def test_a_list_that_names_what_is_gone_keeps_the_others(context: StorageContext, ours: list[Any]):
    shutil.rmtree(ours[2].checkpoint.path)
    with pytest.raises(CheckpointManagerInitializationError):
        loaded_by_ray(context)
    assert len(rjc.rebuild_ray_state(context.experiment_fs_path, score_attribute="score")) == 2
    manager = loaded_by_ray(context)
    assert listed(manager) == ["1", "0"]
    # Reports are counted on, and the score that was a null is none.
    assert manager._current_report_index == 3
    assert "score" not in manager._checkpoint_results[0].metrics


def test_a_null_that_ray_would_rank_is_taken_out(context: StorageContext, ours: list[Any], result_of: MAKE):
    with pytest.raises(TypeError):
        report_to(loaded_by_ray(context), result_of(8, score=2.0))
    assert rjc.rebuild_ray_state(context.experiment_fs_path) == []
    assert len(rjc.rebuild_ray_state(context.experiment_fs_path, score_attribute="score")) == 3
    manager = loaded_by_ray(context)
    # Which of them is still to be validated is not forgotten.
    assert [one.path[-1] for one in manager.get_pending_training_results()] == ["2"]
    report_to(manager, result_of(8, score=2.0))
    assert listed(manager) == ["1", "2", "8", "0"]


def test_where_nothing_is_wrong_nothing_is_changed(context: StorageContext, tmp_path: Path, ours: list[Any]):
    assert rjc.rebuild_ray_state(context.experiment_fs_path) == []
    (tmp_path / "none").mkdir()
    assert rjc.rebuild_ray_state(tmp_path / "none") == []
    assert not list(rays_list(context).parent.glob("*.damaged-*"))
