"""Any sequence of reports, validations and restarts: the books stay true, and something can be restored."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ray.train import Checkpoint, CheckpointConfig, ReportedCheckpointStatus
from ray.train._internal.session import _TrainingResult
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from test_registry import seen

import ray_jax_ckpt as rjc

scores = st.none() | st.floats() | st.integers(0, 3) | st.just("text")


class Histories(RuleBasedStateMachine):
    """A registry, what it was told, and what must follow from that."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="rjc-registry-"))
        self.count = 0
        self.was_complete = False

    @initialize(
        num_to_keep=st.none() | st.integers(1, 2),
        name=st.none() | st.sampled_from(["score", "eval.score"]),
        order=st.sampled_from(["max", "min"]),
    )
    def start(self, num_to_keep: int | None, name: str | None, order: str) -> None:
        config = CheckpointConfig(num_to_keep, name, order)
        self.registry = rjc.Registry(config, StorageContext(self.root, "run"))

    def _report(self, score: Any, pending: Any) -> Any:
        self.count += 1
        context = self.registry._storage_context
        path = Path(context.experiment_fs_path, f"checkpoint_{self.count:03d}")
        path.mkdir()
        metrics = {"score": score, "eval": {"score": score}}
        return _TrainingReport(Checkpoint(str(path), context.storage_filesystem), metrics, pending)

    @rule(score=scores, pending=st.booleans(), as_result=st.booleans())
    def register(self, score: Any, pending: bool, as_result: bool) -> None:
        report = self._report(score, pending)
        if as_result:
            self.registry.register_checkpoint(_TrainingResult(report.checkpoint, report.metrics), pending)
        else:
            self.registry.after_report(report, [report.metrics])
        self.was_complete |= not pending

    @rule()
    def report_without(self) -> None:
        self.registry.after_report(_TrainingReport(None, {}, False), [{}])

    @precondition(lambda self: self.registry.get_pending_training_results())
    @rule(data=st.data(), score=scores, status=st.sampled_from(ReportedCheckpointStatus))
    def validate(self, data: Any, score: Any, status: ReportedCheckpointStatus) -> None:
        pending = sorted(self.registry.get_pending_training_results(), key=lambda one: one.path)
        one = data.draw(st.sampled_from(pending))
        if status in (ReportedCheckpointStatus.COMMITTED, ReportedCheckpointStatus.PENDING_VALIDATION):
            self.registry.update_checkpoints_with_metrics({one: {"score": score}})
            self.was_complete = True
        else:
            self.registry.update_checkpoints_with_validation_result({one: ({"score": score}, status)})
            self.was_complete |= status is ReportedCheckpointStatus.VALIDATED

    @rule()
    def restart(self) -> None:
        old = self.registry
        self.registry = rjc.Registry(old._checkpoint_config, old._storage_context)
        assert seen(self.registry) == seen(old)

    @precondition(lambda self: self.registry._checkpoint_results)
    @rule()
    def through_text(self) -> None:
        before = seen(self.registry)
        self.registry._load_state(self.registry._save_state())
        assert seen(self.registry) == before

    @invariant()
    def something_can_be_restored(self) -> None:
        listed = self.registry._checkpoint_results
        assert {one.checkpoint for one in listed} >= set(self.registry.get_pending_training_results())
        if self.was_complete:
            [found] = self.registry.before_init_train_context([0])["checkpoint"]
            assert Path(found.path).is_dir()
        keep = self.registry._checkpoint_config.num_to_keep
        if keep is not None:
            settled = [one for one in listed if self.registry._record(one).status.is_verified]
            assert len(settled) <= keep + 1

    def teardown(self) -> None:
        assert self.registry.flush() == ""
        there = {str(path) for path in (self.root / "run").glob("checkpoint_*")}
        assert there == {one.checkpoint.path for one in self.registry._checkpoint_results}
        shutil.rmtree(self.root)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
