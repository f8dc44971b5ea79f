"""The books of what a run has reported, as an object of their own: `Registry`."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    ValidationTaskConfig,
)

from ray_jax_ckpt import metrics as metrics_
from ray_jax_ckpt._ray_compat import CheckpointManagerInitializationError, TrainingResult
from ray_jax_ckpt.errors import ConfigError, StateError
from ray_jax_ckpt.model import results
from ray_jax_ckpt.model.metrics import put_back
from ray_jax_ckpt.model.results import Entry, Policy, Status
from ray_jax_ckpt.storage.filesystem import describe, join
from ray_jax_ckpt.storage.inventory import problem_of
from ray_jax_ckpt.storage.ray_state import listed_by_ray
from ray_jax_ckpt.storage.remover import Remover
from ray_jax_ckpt.storage.saver import saver_of
from ray_jax_ckpt.storage.state import STATE, Loaded, Record, State, StateFile, parse_state
from ray_jax_ckpt.waiters import Waiters

logger = logging.getLogger(__name__)

_VALIDATION = {
    ReportedCheckpointStatus.VALIDATED: Status.VALIDATED,
    ReportedCheckpointStatus.VALIDATION_TIMEOUT: Status.VALIDATION_TIMED_OUT,
    ReportedCheckpointStatus.VALIDATION_FAILED: Status.INVALID,
}
_AS_REPORTED = {ours: rays for rays, ours in _VALIDATION.items()} | {
    Status.COMPLETE: ReportedCheckpointStatus.COMMITTED,
    Status.VALIDATING: ReportedCheckpointStatus.PENDING_VALIDATION,
}


class Registry:
    """Knows what was reported, in which order, what of it is still to be validated, and which is the best.

    It keeps the best `num_to_keep` and always the newest verified one, removes the others in the background when the
    state that does not list them is on storage, and is the same again in a new process: the state lies in
    `<run>/ray_jax_ckpt/state.json`, written off the calling thread. If somebody else writes that, such as the
    `CheckpointManager` of a run that goes on, theirs stays, with a warning, and nothing more is kept or removed here.
    It never removes what lies outside of the run's directory, what was not registered, or what Ray's own list names.
    Thread-safe; none of its methods but the constructor, `flush` and `before_init_train_context` waits for storage.

    Args:
        checkpoint_config: Of Ray: how many stay, and by which metric. A name may be a path, as "eval.loss".
        storage_context: Of Ray, or anything with `storage_filesystem` and `experiment_fs_path`.
        timeout_s: How long the constructor waits for what an earlier registry of this process writes.

    Raises:
        NotSupportedError: A newer version of this package has kept the state.
        StorageError: Storage cannot be read. A state that is damaged is no error: see `StateFile.load`.
    """

    def __init__(self, checkpoint_config: CheckpointConfig, storage_context: Any, *, timeout_s: float = 60.0) -> None:
        self._checkpoint_config, self._storage_context = checkpoint_config, storage_context
        self._filesystem, self._run_path = storage_context.storage_filesystem, storage_context.experiment_fs_path
        self._policy = Policy(
            checkpoint_config.num_to_keep,
            checkpoint_config.checkpoint_score_attribute,
            checkpoint_config.checkpoint_score_order or "max",  # pyright: ignore[reportArgumentType]
        )
        self._lock, self._writer = threading.RLock(), object()
        self._waiters = Waiters()
        self._saver = saver_of(StateFile(self._filesystem, self._run_path, yields=True))
        self._remover = Remover(
            self._filesystem,
            self._run_path,
            lambda: listed_by_ray(self._filesystem, self._run_path),
            self._is_removed,
        )
        self._saver.flush(timeout_s)
        self._base, self._records = State(), dict[str, Record]()
        self._checkpoint_results: list[TrainingResult] = []
        self._pending_training_results: dict[Checkpoint, tuple[TrainingResult, Any]] = {}
        self._current_report_index = 0
        self._maybe_load_state_from_storage()

    # What is reported.

    def register_checkpoint(self, result: Any, is_result_pending: Any = None) -> None:
        """Adds what was reported.

        Args:
            result: Ray's training result with `checkpoint` and `metrics`, or its training report, which says itself
                whether it is to be validated.
            is_result_pending: Whether metrics are still to come: it is never removed before.

        Raises:
            ValueError: The checkpoint lies outside of the run's directory.
        """
        spec: Any = getattr(result, "validation", is_result_pending) or None
        if not isinstance(result, TrainingResult):
            result = TrainingResult(checkpoint=result.checkpoint, metrics=result.metrics)
        with self._lock:
            checkpoint = _checkpoint_of(result)
            path = self._relative(checkpoint.path)
            if path in self._records:
                logger.warning("%s was reported before: it is what was reported now, and counts once.", checkpoint)
                self._drop({path})
            self._records[path] = Record(
                path=path,
                report_index=self._current_report_index,
                status=Status.VALIDATING if spec else Status.COMPLETE,
                origin="report",
                metrics=_of_books(result.metrics),
                created_at_s=time.time(),
                validation=_plain_spec(spec),
            )
            self._checkpoint_results.append(result)
            if spec:
                self._pending_training_results[checkpoint] = (result, spec)
            self._current_report_index += 1
            self._changed()

    def update_checkpoints_with_metrics(self, checkpoint_to_metrics: Mapping[Checkpoint, Mapping[str, Any]]) -> None:
        """Metrics that were to come have come: each result is sorted anew, and may be removed from now on.

        One that is not pending is a warning. Raises ValueError for one that is pending and not listed.
        """
        validated = ReportedCheckpointStatus.VALIDATED
        self.update_checkpoints_with_validation_result(
            {checkpoint: (found, validated) for checkpoint, found in checkpoint_to_metrics.items()}
        )

    def update_checkpoints_with_validation_result(
        self, checkpoint_updates: Mapping[Checkpoint, tuple[Mapping[str, Any], ReportedCheckpointStatus]]
    ) -> None:
        """Validations have ended. Metrics count only of those that succeeded; the others are not restorable any more.

        One that is not pending is a warning. Raises ValueError for one that is pending and not listed, and for a status
        that ends no validation; the ones before it are updated then.
        """
        with self._lock:
            try:
                for checkpoint, (found, status) in checkpoint_updates.items():
                    self._update(checkpoint, found, status)
            finally:
                self._changed()

    def _update(self, checkpoint: Checkpoint, found: Mapping[str, Any], status: ReportedCheckpointStatus) -> None:
        if status not in _VALIDATION:
            raise ValueError(f"{status} is not how a validation ends (of {checkpoint}).")
        pending = self._pending_of(checkpoint)
        if pending is None:
            logger.warning("Metrics came for %s, which is not pending: they are passed over.", checkpoint)
            return
        result, _ = self._pending_training_results[pending]
        if result not in self._checkpoint_results:
            raise ValueError(f"{checkpoint} is pending, and not among the results that are listed.")
        del self._pending_training_results[pending]
        path = self._relative(checkpoint.path)
        changes: dict[str, Any] = {"status": _VALIDATION[status], "validation": None}
        if status is ReportedCheckpointStatus.VALIDATED:
            result.metrics.update(found)
            changes["metrics"] = _of_books(result.metrics)
        else:
            changes["reason"] = f"validation: {status.value}"
        self._records[path] = self._records[path].model_copy(update=changes)

    def _pending_of(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The object that stands for the same checkpoint among the pending ones; after a load it is another one."""
        if checkpoint in self._pending_training_results:
            return checkpoint
        same = (one for one in self._pending_training_results if one.path == checkpoint.path)
        return next(same, None)

    def after_report(self, training_report: Any, metrics: Any) -> None:
        """Ray's hook: the report itself and every rank's metrics; or, as it was, every rank's metrics and a checkpoint.

        A report without a checkpoint counts, and is not kept.
        """
        if isinstance(training_report, Sequence):
            ranks, checkpoint = training_report, metrics
            training_report = TrainingResult(checkpoint=checkpoint, metrics=dict(ranks[0]) if ranks else {})
        if training_report.checkpoint:
            self.register_checkpoint(training_report)
            return
        with self._lock:
            self._current_report_index += 1
            self._changed()

    # What is known.

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """How many stay, and by which metric."""
        return self._checkpoint_config

    @property
    def best_checkpoint_results(self) -> list[TrainingResult]:
        """What can be restored, the best one last; without a score the newest."""
        with self._lock:
            return [one for one in self._checkpoint_results if self._record(one).status.is_restorable]

    @property
    def best_checkpoint_result(self) -> TrainingResult | None:
        """The best that can be restored."""
        return next(reversed(self.best_checkpoint_results), None)

    @property
    def latest_checkpoint_result(self) -> TrainingResult | None:
        """The newest that can be restored."""
        found = self.best_checkpoint_results
        return max(found, key=lambda one: self._record(one).report_index or 0, default=None)

    def get_pending_training_results(self) -> dict[Checkpoint, tuple[TrainingResult, Any]]:
        """What is still to be validated, and how."""
        with self._lock:
            return dict(self._pending_training_results)

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """Ray's hook: what each worker is to restore. One that is gone or broken is dropped, and the next is taken."""
        with self._lock:
            latest = self._servable()
        return {"checkpoint": [latest] * len(workers)}

    def _servable(self) -> Checkpoint | None:
        candidates = sorted(self.best_checkpoint_results, key=lambda one: -(self._record(one).report_index or 0))
        problems = {}
        for one in candidates:
            problem = problem_of(self._filesystem, _checkpoint_of(one).path)
            if not problem:
                break
            problems[self._record(one).path] = problem
        if len(problems) == len(candidates):
            # To start afresh without a word would be to lose the run; whoever restores it fails, and says why.
            for path, problem in problems.items():
                logger.warning("%s cannot be restored, and neither can any other: %s", path, problem)
            return candidates[0].checkpoint if candidates else None
        for path, problem in problems.items():
            logger.warning("%s is not listed any more, and the one before it is restored: %s", path, problem)
        if problems:
            self._drop(set(problems))
            self._changed()
        return candidates[len(problems)].checkpoint

    async def get_all_reported_checkpoints(
        self,
        current_report_index: int,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """All that was reported and is listed, worst first.

        Args:
            current_report_index: Waits until so many reports have come.
            consistency_mode: COMMITTED: no more. VALIDATED: also until none is to be validated.
            timeout_s: How long. None: for ever. Afterwards what is known by then is returned.

        Raises:
            ValueError: There is no such mode.
        """
        if not isinstance(consistency_mode, CheckpointConsistencyMode):
            raise ValueError(f"{consistency_mode!r} is no CheckpointConsistencyMode.")
        validated = consistency_mode is CheckpointConsistencyMode.VALIDATED

        def ready() -> bool:
            with self._lock:
                pending = validated and self._pending_training_results
                return self._current_report_index >= current_report_index and not pending

        if not await self._waiters.until(ready, timeout_s):
            logger.debug("Not all of %d reports were %s in time.", current_report_index, consistency_mode.value)
        with self._lock:
            return [
                ReportedCheckpoint(_checkpoint_of(one), one.metrics, _AS_REPORTED[self._record(one).status])
                for one in self._checkpoint_results
            ]

    # The state.

    def flush(self, timeout_s: float = 60.0) -> str:
        """Waits until the state is on storage and what is superfluous is gone. Returns what is wrong, or ""."""
        deadline = time.monotonic() + timeout_s
        problem = self._saver.flush(timeout_s)
        if not problem and not self._remover.join(max(0.0, deadline - time.monotonic())):
            problem = f"what is superfluous was not removed within {timeout_s:g} s"
        return problem or self._saver.flush(max(0.0, deadline - time.monotonic()))

    def _save_state(self) -> str:
        """The state as text."""
        with self._lock:
            return self._state().to_bytes().decode()

    def _load_state(self, json_state: str) -> None:
        """Takes a state for its own.

        Raises:
            StateError: It is none, or damaged. It is Ray's `CheckpointManagerInitializationError` as well.
            NotSupportedError: A newer version of this package wrote it.
        """
        try:
            state = parse_state(json_state.encode(), "The text")
        except StateError as error:
            raise _InitializationError(str(error)) from None
        with self._lock:
            self._take(state)
            self._waiters.wake()

    def _state(self) -> State:
        others = tuple(one for one in self._base.checkpoints if one.origin != "report")
        return self._base.changed(
            run=self._run_path.rpartition("/")[2],
            report_index=self._current_report_index,
            checkpoints=(*others, *self._records.values()),
        )

    def _take(self, state: State) -> None:
        self._base, self._records, self._pending_training_results = state, {}, {}
        self._current_report_index = state.report_index
        found = []
        for record in state.checkpoints:
            if record.origin != "report" or record.status not in _AS_REPORTED:
                continue
            checkpoint = Checkpoint(join(self._run_path, record.path), filesystem=self._filesystem)
            result = TrainingResult(checkpoint=checkpoint, metrics=dict(record.metrics))
            self._records[record.path] = record
            found.append(result)
            if record.status is Status.VALIDATING:
                self._pending_training_results[checkpoint] = (result, _spec(record.validation))
        self._checkpoint_results = found
        self._sort()

    def _maybe_load_state_from_storage(self) -> None:
        loaded = self._saver.file.load()
        self._take(loaded.state)
        self._announce(loaded)
        if self._base.removing:
            self._remover.remove(self._base.removing, self._saver.put(self._state(), self._writer))

    def _announce(self, loaded: Loaded) -> None:
        where = describe(self._filesystem, join(self._run_path, STATE))
        if loaded.found == "none":
            logger.info("There is no state at %s, and no checkpoint: training starts from the beginning.", where)
            return
        latest = self.latest_checkpoint_result
        what = "none that can be restored" if latest is None else f"the newest is {latest.checkpoint}"
        logger.info(
            "The state of an earlier start of this run was found at %s (%s): %d checkpoints, %s. Training goes on from "
            "it. To start afresh use another name= in RunConfig.",
            where,
            loaded.found,
            len(self._records),
            what,
        )

    # Inside.

    def _changed(self) -> None:
        """After every change: sorts, forgets what is superfluous, has the state written, and only then removes."""
        self._sort()
        doomed = [entry.key for entry in results.superfluous(self._policy, self._entries())]
        self._drop(set(doomed))
        self._base = self._base.changed(removing=(*self._base.removing, *doomed))
        saved = self._saver.put(self._state(), self._writer)
        if doomed:
            logger.info("These checkpoints are superfluous and will be removed: %s.", ", ".join(doomed))
            self._remover.remove(doomed, saved)
        self._waiters.wake()

    def _is_removed(self, path: str) -> None:
        with self._lock:
            self._base = self._base.changed(removing=tuple(one for one in self._base.removing if one != path))
            self._saver.amend(self._state(), self._writer)

    def _drop(self, paths: set[str]) -> None:
        if not paths:
            return
        self._records = {path: record for path, record in self._records.items() if path not in paths}
        pending = self._pending_training_results
        self._pending_training_results = {c: one for c, one in pending.items() if self._relative(c.path) not in paths}
        self._checkpoint_results = [
            one for one in self._checkpoint_results if self._relative(_checkpoint_of(one).path) not in paths
        ]

    def _entries(self) -> list[Entry]:
        return [Entry(r.path, r.report_index, r.step, r.status, r.metrics) for r in self._records.values()]

    def _sort(self) -> None:
        order = {entry.key: n for n, entry in enumerate(results.ranked(self._policy, self._entries()))}
        self._checkpoint_results.sort(key=lambda one: order[self._relative(_checkpoint_of(one).path)])

    def _record(self, result: TrainingResult) -> Record:
        return self._records[self._relative(_checkpoint_of(result).path)]

    def _relative(self, path: str) -> str:
        prefix = self._run_path.rstrip("/") + "/"
        if not path.startswith(prefix):
            raise ConfigError(
                f"The checkpoint {path} does not lie in the run's directory {self._run_path}. Report it with an "
                "upload, or write it there."
            )
        return path[len(prefix) :].rstrip("/")


class _InitializationError(StateError, CheckpointManagerInitializationError):
    """Of a state, where Ray's own manager has an error of its own."""


def _checkpoint_of(result: TrainingResult) -> Checkpoint:
    assert result.checkpoint is not None
    return result.checkpoint


def _of_books(found: Mapping[str, Any]) -> dict[str, Any]:
    return put_back(metrics_.kept(found))


def _plain_spec(spec: Any) -> Any:
    return metrics_.kept(dataclasses.asdict(spec)) if dataclasses.is_dataclass(spec) else bool(spec) or None  # pyright: ignore


def _spec(plain: Any) -> Any:
    return ValidationTaskConfig(**plain) if isinstance(plain, dict) else True
