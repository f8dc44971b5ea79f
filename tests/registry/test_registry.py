"""The registry with Ray's storage context, checkpoints and results, without a cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.train import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    ReportedCheckpointStatus,
    ValidationTaskConfig,
)
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import NotSupportedError, StateError
from ray_jax_ckpt.storage import saver, state
from ray_jax_ckpt.storage.state import STATE, Driver, State, StateFile

BEST = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score", checkpoint_score_order="max")
MAKE = Callable[..., Any]
VALIDATED = CheckpointConsistencyMode.VALIDATED
COMMITTED = CheckpointConsistencyMode.COMMITTED


def seen(registry: rjc.Registry) -> list[Any]:
    """All that two registries have to agree on. NaN is text, which is equal to itself."""
    results = registry.best_checkpoint_results
    latest, best = registry.latest_checkpoint_result, registry.best_checkpoint_result
    chosen = [None if one is None else (one.checkpoint.path, repr(one.metrics)) for one in (latest, best)]
    listed = [(one.checkpoint.path, repr(one.metrics), one.checkpoint.filesystem.type_name) for one in results]
    pending = {one.path: spec for one, (_, spec) in registry.get_pending_training_results().items()}
    return [*chosen, listed, pending, registry._current_report_index]


def reloaded(registry: rjc.Registry) -> rjc.Registry:
    return rjc.Registry(registry._checkpoint_config, registry._storage_context)


def names(registry: rjc.Registry) -> list[str]:
    return [one.checkpoint.path.rpartition("/")[2] for one in registry._checkpoint_results]


def on_disk(context: StorageContext) -> set[str]:
    return {path.name for path in Path(context.experiment_fs_path).glob("checkpoint_*") if path.is_dir()}


@pytest.mark.parametrize("config", [CheckpointConfig(), BEST])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_new_one_is_as_the_old_one_was(context: StorageContext, result_of: MAKE, config: Any, in_loop: bool):
    def body() -> None:
        registry = rjc.Registry(config, context)
        for number in range(3):
            registry.register_checkpoint(result_of(number), None)
            assert registry._current_report_index == number + 1
            again = reloaded(registry)
            assert seen(again) == seen(registry)
            assert again._checkpoint_config == registry._checkpoint_config

    async def with_loop() -> None:
        body()

    asyncio.run(with_loop()) if in_loop else body()


def test_directories_that_never_were_do_not_lose_the_list(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(BEST, context)
    result = result_of(0)
    shutil.rmtree(result.checkpoint.path)
    registry.register_checkpoint(result, None)
    assert registry.before_init_train_context([1, 2]) == {"checkpoint": [result.checkpoint] * 2}
    assert seen(reloaded(registry)) == seen(registry)


@pytest.mark.parametrize("text", ['{"dummy": "1"}', '{"dummy": "1', ""])
def test_text_that_is_no_state_is_refused(context: StorageContext, text: str):
    with pytest.raises(StateError):
        rjc.Registry(CheckpointConfig(), context)._load_state(text)


def test_an_error_of_the_state_is_ray_s_own_too(context: StorageContext):
    with pytest.raises(CheckpointManagerInitializationError, match="version"):
        rjc.Registry(CheckpointConfig(), context)._load_state("{}")


def test_what_somebody_else_writes_meanwhile_stays(context: StorageContext, result_of: MAKE, caplog: Any):
    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(1))
    assert registry.flush() == ""
    path = Path(context.experiment_fs_path, STATE)
    theirs = State(run="theirs", driver=Driver(id="of a run that goes on", host="here", pid=7)).to_bytes()
    path.write_bytes(theirs)
    with caplog.at_level(logging.WARNING):
        registry.register_checkpoint(result_of(2))
        assert "two write the books of one run" in registry.flush(30)
    assert path.read_bytes() == theirs
    assert "of a run that goes on (process 7 on here)" in caplog.text
    # What is not known to be forgotten is not removed.
    assert on_disk(context) == {"checkpoint_001", "checkpoint_002"}


@pytest.mark.parametrize("comes_through", [False, True])
def test_a_write_that_failed_is_nobody_else_s(context: StorageContext, result_of: MAKE, monkeypatch, comes_through):
    written, failures = state.write_whole, []
    monkeypatch.setattr(saver, "FIRST_PAUSE_S", 0.01)

    def write_whole(filesystem: Any, path: str, raw: bytes) -> None:
        fails = path.endswith(STATE) and len(failures) < 2
        if not fails or comes_through:
            written(filesystem, path, raw)
        if fails:
            failures.append(path)
            raise OSError("no space left")

    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(1))
    assert registry.flush() == ""
    monkeypatch.setattr(state, "write_whole", write_whole)
    registry.register_checkpoint(result_of(2))
    assert registry.flush() == ""
    assert len(failures) == 2
    assert seen(reloaded(registry)) == seen(registry)
    assert on_disk(context) == {"checkpoint_002"}


def test_a_driver_that_is_listed_is_not_impersonated(context: StorageContext, result_of: MAKE):
    driver = Driver(id="lives", host="here", pid=7, started_at_s=1.0)
    coordinator = StateFile(context.storage_filesystem, context.experiment_fs_path)
    coordinator.save(State(run="run", driver=driver))
    registry = rjc.Registry(BEST, context)
    coordinator.save(State(run="run", driver=driver, report_index=3))
    registry.register_checkpoint(result_of(1))
    assert "two write" in registry.flush(30)
    assert coordinator.load().state.report_index == 3


def test_state_as_text_goes_round(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(1, score=math.nan, text="NaN"), True)
    before = registry._save_state()
    registry._load_state(before)
    assert json.loads(registry._save_state()) == json.loads(before)


def test_workers_get_the_newest(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(CheckpointConfig(checkpoint_score_attribute="score"), context)
    assert registry.before_init_train_context(list("abcd")) == {"checkpoint": [None] * 4}
    for number in (5, 3):
        registry.register_checkpoint(result_of(number))
    newest = registry.latest_checkpoint_result
    assert newest.metrics == {"score": 3}
    assert registry.before_init_train_context(list("abcd")) == {"checkpoint": [newest.checkpoint] * 4}
    assert registry.best_checkpoint_result.metrics == {"score": 5}


def test_pending_ones_stay_until_their_metrics_come(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(BEST, context)
    results = [result_of(number) for number in range(3)]
    registry.register_checkpoint(results[0], True)
    registry.register_checkpoint(results[2], False)
    registry.register_checkpoint(results[1], True)
    assert registry._checkpoint_results == results
    registry.update_checkpoints_with_metrics(
        {results[0].checkpoint: {"score": 100}, results[1].checkpoint: {"score": 200}}
    )
    assert registry._checkpoint_results == [results[1]]
    assert registry.flush() == ""
    assert on_disk(context) == {"checkpoint_001"}


def test_a_validation_that_failed_is_not_restored(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(CheckpointConfig(num_to_keep=2), context)
    good, bad, late = (result_of(number) for number in range(3))
    registry.register_checkpoint(good)
    for one in (bad, late):
        registry.register_checkpoint(_TrainingReport(one.checkpoint, one.metrics, ValidationTaskConfig({"a": 1}, 9.0)))
    assert registry.latest_checkpoint_result.checkpoint is late.checkpoint
    assert seen(reloaded(registry)) == seen(registry)
    status = ReportedCheckpointStatus
    registry.update_checkpoints_with_validation_result(
        {
            bad.checkpoint: ({"score": 9}, status.VALIDATION_FAILED),
            late.checkpoint: ({}, status.VALIDATION_TIMEOUT),
        }
    )
    for one in (registry, reloaded(registry)):
        assert one.latest_checkpoint_result.metrics == one.best_checkpoint_result.metrics == {"score": 0}
        assert len(one.best_checkpoint_results) == 1
        found = asyncio.run(one.get_all_reported_checkpoints(3, VALIDATED, 1))
        expected = [status.COMMITTED, status.VALIDATION_FAILED, status.VALIDATION_TIMEOUT]
        assert [each.status for each in found] == expected
        assert [each.metrics for each in found] == [{"score": n} for n in range(3)]
    # With a newer one that is good they go.
    registry.register_checkpoint(result_of(4))
    assert registry.flush() == ""
    assert on_disk(context) == {"checkpoint_000", "checkpoint_004"}


def test_what_is_not_pending_is_a_warning_and_what_is_not_listed_an_error(
    context: StorageContext, result_of: MAKE, caplog: Any
):
    registry = rjc.Registry(CheckpointConfig(), context)
    known, unknown = result_of(0), result_of(1)
    registry.register_checkpoint(known, True)
    registry.update_checkpoints_with_metrics({unknown.checkpoint: {"score": 1}})
    assert "which is not pending" in caplog.text
    registry._checkpoint_results.clear()
    with pytest.raises(ValueError, match="is pending, and not among the results that are listed"):
        registry.update_checkpoints_with_metrics({known.checkpoint: {"score": 1}})


def test_metrics_find_what_a_new_registry_holds(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(BEST, context)
    first = result_of(0)
    registry.register_checkpoint(first, True)
    again = reloaded(registry)
    # The object is another one, the checkpoint is the same.
    again.update_checkpoints_with_metrics({first.checkpoint: {"score": 7}})
    assert again.best_checkpoint_result.metrics == {"score": 7}
    assert not again.get_pending_training_results()


def test_ties_go_by_report_and_bad_scores_are_worst(context: StorageContext, result_of: MAKE):
    config = CheckpointConfig(checkpoint_score_attribute="eval.loss", checkpoint_score_order="min")
    registry = rjc.Registry(config, context)
    for number, loss in enumerate([2.0, math.nan, 1.0, None, "0", 1.0, 3.0, np.float32(0.5), -math.inf]):
        registry.register_checkpoint(result_of(number, eval={"loss": loss}))
    registry.register_checkpoint(result_of(9, other=1))
    assert [int(name[-3:]) for name in names(registry)] == [1, 3, 4, 8, 9, 6, 0, 2, 5, 7]
    assert seen(reloaded(registry))[2][-1][1] == "{'eval': {'loss': 0.5}}"


def test_metrics_that_cannot_be_stored_are_text_and_the_checkpoint_counts(
    context: StorageContext, result_of: MAKE, caplog: Any
):
    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(0, score=1, all=np.arange(3), what={1}))
    assert reloaded(registry).best_checkpoint_result.metrics == {"score": 1, "all": "array([0, 1, 2])", "what": "{1}"}
    assert "'what' is kept as text" in caplog.text


def test_a_score_that_stood_aside_for_ray_is_back_in_the_books(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(0, **rjc.to_metrics({"score": math.nan}, score="score")))
    assert math.isnan(reloaded(registry).best_checkpoint_result.metrics["score"])


def test_reports_go_on_over_groups_and_drivers(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(CheckpointConfig(), context)
    registry.after_report(_TrainingReport(None, {"score": 1}, False), [{}])
    one = result_of(1)
    registry.after_report(_TrainingReport(one.checkpoint, one.metrics, False), [{}])
    registry.after_report([{"score": 2}, {"score": 3}], result_of(2).checkpoint)
    registry.before_init_train_context([1])
    assert registry._current_report_index == 3
    again = reloaded(registry)
    assert again._current_report_index == 3
    again.after_report(_TrainingReport(result_of(3).checkpoint, {}, True), [{}])
    assert (again._current_report_index, len(again.get_pending_training_results())) == (4, 1)
    assert again.best_checkpoint_results[1].metrics == {"score": 2}


def test_the_same_directory_again_counts_once(context: StorageContext, result_of: MAKE, caplog: Any):
    registry = rjc.Registry(BEST, context)
    registry.register_checkpoint(result_of(1, score=1), True)
    registry.register_checkpoint(result_of(1, score=2))
    assert [one.metrics for one in registry._checkpoint_results] == [{"score": 2}]
    assert not registry.get_pending_training_results()
    assert "was reported before" in caplog.text
    assert registry.flush() == ""
    assert on_disk(context) == {"checkpoint_001"}


def test_what_lies_elsewhere_is_refused(context: StorageContext, result_of: MAKE, tmp_path: Path):
    result = result_of(1)
    result.checkpoint.path = str(tmp_path / "elsewhere" / "c")
    with pytest.raises(ValueError, match="does not lie in the run's directory"):
        rjc.Registry(BEST, context).register_checkpoint(result)


# Waiting.


def test_who_waits_is_woken_by_any_thread(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(CheckpointConfig(), context)
    first = result_of(0)

    async def wait() -> list[Any]:
        committed = asyncio.create_task(registry.get_all_reported_checkpoints(1, COMMITTED))
        validated = asyncio.create_task(registry.get_all_reported_checkpoints(1))
        await asyncio.sleep(0)
        threading.Thread(target=registry.register_checkpoint, args=(first, True)).start()
        assert [one.metrics for one in await committed] == [{"score": 0}]
        assert not validated.done()
        # A loop that is running already, and not asked to do anything later.
        registry.update_checkpoints_with_metrics({first.checkpoint: {"score": 5}})
        # At least so many, not exactly.
        assert len(await registry.get_all_reported_checkpoints(0, COMMITTED)) == 1
        return await validated

    [found] = asyncio.run(asyncio.wait_for(wait(), 20))
    assert (found.metrics, found.status) == ({"score": 5}, ReportedCheckpointStatus.VALIDATED)


def test_waiting_is_bounded(context: StorageContext, result_of: MAKE):
    registry = rjc.Registry(CheckpointConfig(), context)
    registry.register_checkpoint(result_of(0), True)
    [found] = asyncio.run(registry.get_all_reported_checkpoints(1, VALIDATED, 0.05))
    assert found.status is ReportedCheckpointStatus.PENDING_VALIDATION
    with pytest.raises(ValueError, match="is no CheckpointConsistencyMode"):
        asyncio.run(registry.get_all_reported_checkpoints(1, "all"))  # pyright: ignore[reportArgumentType]


# Storage.


@pytest.mark.parametrize("damage", ["half", "empty", "missing", "gone", "field"])
def test_a_bad_state_costs_no_checkpoint(context: StorageContext, result_of: MAKE, damage: str):
    registry = rjc.Registry(CheckpointConfig(), context)
    for number in range(3):
        registry.register_checkpoint(result_of(number))
        assert registry.flush() == ""
    state = Path(context.experiment_fs_path, STATE)
    raw, before = state.read_bytes(), seen(registry)
    if damage == "half":
        state.write_bytes(raw[: len(raw) // 2])
    elif damage == "empty":
        state.write_bytes(b"")
    elif damage == "missing":
        state.unlink()
    elif damage == "gone":
        shutil.rmtree(f"{context.experiment_fs_path}/checkpoint_002")
    else:
        state.write_bytes(raw.replace(b'{"version"', b'{"colour":"red","version"', 1))
    again = reloaded(registry)
    if damage == "field":
        assert seen(again) == before
    else:
        # The state before the last report, or all but what is gone.
        assert names(again) == ["checkpoint_000", "checkpoint_001"]
        assert again.before_init_train_context([1])["checkpoint"][0].path.endswith("checkpoint_001")


def test_a_state_of_a_newer_version_is_refused(context: StorageContext):
    state = Path(context.experiment_fs_path, STATE)
    state.parent.mkdir()
    state.write_text('{"version": 99}')
    with pytest.raises(NotSupportedError, match="has version 99"):
        rjc.Registry(CheckpointConfig(), context)


def test_one_that_has_gone_meanwhile_is_dropped_and_the_next_serves(
    context: StorageContext, result_of: MAKE, caplog: Any
):
    registry = rjc.Registry(CheckpointConfig(), context)
    for number in range(3):
        registry.register_checkpoint(result_of(number))
    shutil.rmtree(f"{context.experiment_fs_path}/checkpoint_002")
    # One of ours that lacks its manifest was not finished.
    Path(context.experiment_fs_path, "checkpoint_001", "ray_jax_ckpt").mkdir()
    [found] = registry.before_init_train_context([1])["checkpoint"]
    assert found.path.endswith("checkpoint_000")
    assert names(registry) == ["checkpoint_000"]
    assert "checkpoint_002 is not listed any more, and the one before it is restored: it is gone" in caplog.text


def test_what_rays_list_names_is_rays_to_remove(context: StorageContext, result_of: MAKE, list_of_ray: MAKE):
    registry = rjc.Registry(BEST, context)
    results = [result_of(number) for number in range(4)]
    list_of_ray(results[:2])
    for one in results:
        registry.register_checkpoint(one)
    assert registry.flush() == ""
    assert names(registry) == ["checkpoint_003"]
    assert on_disk(context) == {"checkpoint_000", "checkpoint_001", "checkpoint_003"}


def test_a_run_that_ray_alone_has_kept_is_taken_over(context: StorageContext, result_of: MAKE, list_of_ray: MAKE):
    list_of_ray([result_of(number) for number in range(2)])
    registry = rjc.Registry(CheckpointConfig(), context)
    assert [one.metrics for one in registry.best_checkpoint_results] == [{"score": 0}, {"score": 1}]
    assert (registry._current_report_index, len(registry.get_pending_training_results())) == (2, 1)


def test_what_is_removed_goes_after_the_state_and_again_if_it_was_cut_short(
    context: StorageContext, result_of: MAKE, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    state = Path(context.experiment_fs_path, STATE)
    said = []

    def refuse(filesystem: Any, path: str, first: Any = None) -> None:
        said.append((path[-3:], "checkpoint_000" in json.dumps(json.loads(state.read_text())["checkpoints"])))
        raise OSError("not today")

    with monkeypatch.context() as patch:
        patch.setattr("ray_jax_ckpt.storage.remover.remove_tree", refuse)
        patch.setattr("ray_jax_ckpt.storage.remover.FIRST_PAUSE_S", 0.001)
        registry = rjc.Registry(BEST, context)
        for number in range(2):
            registry.register_checkpoint(result_of(number))
        assert registry.flush() == ""
    assert said == [("000", False)] * 5
    assert "The next driver tries again" in caplog.text
    assert reloaded(registry).flush() == ""
    assert on_disk(context) == {"checkpoint_001"}
    assert json.loads(state.read_text())["removing"] == []


def test_log_lines_say_what_was_found(context: StorageContext, result_of: MAKE, caplog: Any):
    with caplog.at_level(logging.INFO, "ray_jax_ckpt"):
        registry = rjc.Registry(BEST, context)
        assert "training starts from the beginning" in caplog.text
        for number in range(2):
            registry.register_checkpoint(result_of(number))
        registry.flush()
        assert "will be removed: checkpoint_000" in caplog.text
        assert "Removed the checkpoint" in caplog.text
        reloaded(registry)
        assert f"{context.experiment_fs_path}/ray_jax_ckpt/state.json (state): 1 checkpoints" in caplog.text
        assert "To start afresh use another name=" in caplog.text
