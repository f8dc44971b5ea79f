"""The callback in Ray Train's controller that ties a run to its snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from ray_jax_ckpt import _ray_compat, start_hook
from ray_jax_ckpt.config import PersistConfig, ResumeMode, SnapshotConfig
from ray_jax_ckpt.environment import is_enabled, read_settings
from ray_jax_ckpt.errors import ConfigError, PersistError
from ray_jax_ckpt.hooks import HookTimes, safe
from ray_jax_ckpt.membership import group_members, warn_of_few_domains
from ray_jax_ckpt.memory.claim import DriverIdentity, claim
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.metrics import kept
from ray_jax_ckpt.model.choice import Resume
from ray_jax_ckpt.model.metrics import encode, put_back
from ray_jax_ckpt.run_identity import run_identity

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 20.0


if TYPE_CHECKING:
    # RunConfig is annotated to take this one only; it takes the others as well.
    from ray.train import UserCallback as _Callback
else:

    class _Callback(_ray_compat.ReportCallback, _ray_compat.WorkerGroupCallback, _ray_compat.ControllerCallback):
        """What Ray Train's controller calls."""


class CheckpointManager(_Callback):
    """Keeps snapshots of a run in memory and restores the newest one when Ray Train restarts the workers.

    Give it to `RunConfig(callbacks=[CheckpointManager(...)])`. The run is its storage path and name: a new driver with
    the same ones finds what still lives of it. It pickles (Ray ships it to the controller). Its hooks only send
    asynchronous calls to the run's coordinator and never wait for a worker, a store or storage, but where their
    docstrings say so, with the bound. They never raise, but where another driver trains the run, and where what was due
    is not on storage at the end.

    What a worker group restores is the newest of what is complete in memory, what the stores have written and what was
    reported through Ray, each verified, the same for all ranks. If two attempts have restored it and failed with the
    same error before anything newer was complete, the next older one is taken, where there is one; the log says so.

    Args:
        snapshot: What is kept in memory, and how. None: the defaults of `SnapshotConfig`.
        persist: What of it is written to the run's storage, and what stays there. None: nothing.
        resume: What becomes of a run of this name that has been there before. "auto": it goes on, as with Ray alone,
            also one that ended well (a warning says so then). "never": nothing of it is restored, and its checkpoints
            stay where they are. "must": it goes on, and its workers get an error if there is nothing to go on from.
        resume_from: A checkpoint on storage to begin with, of this package or of plain Orbax, as a path or URI. It
            counts while the run itself has nothing to restore (with `resume="never"`: nothing that this driver made).

    Raises:
        ConfigError: An argument is not of its type.
    """

    def __init__(
        self,
        snapshot: SnapshotConfig | None = None,
        persist: PersistConfig | None = None,
        *,
        resume: ResumeMode = "auto",
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(snapshot, SnapshotConfig | None):
            raise ConfigError(f"CheckpointManager(snapshot=...) takes a SnapshotConfig, {_got(snapshot)}.")
        if not isinstance(persist, PersistConfig | None):
            raise ConfigError(f"CheckpointManager(persist=...) takes a PersistConfig, {_got(persist)}.")
        self._config, self._persist = snapshot or SnapshotConfig(), persist
        self._resume = Resume(resume, _place(resume_from))
        self._id, self._enabled = uuid.uuid4().hex, is_enabled()
        self._shipped_by = socket.gethostname(), os.getpid()
        self._coordinator: Any = None
        self._decision: Any = None
        self._group: Any = None
        self._failed = False
        self._passed_on: Any = None
        self.times = HookTimes()

    def __getstate__(self) -> dict[str, Any]:
        """What ships it is the driver."""
        return {**self.__dict__, "_shipped_by": (socket.gethostname(), os.getpid())}

    # The controller.

    @safe
    def after_controller_start(self, train_run_context: Any) -> None:
        """Starts the run's coordinator beside the controller, owned by it.

        Blocks only while there is a coordinator of another driver of this run, alive or dying: see `memory.claim`.

        Raises:
            RunInUseError: Another driver trains this run. It ends this one, and `fit()` raises Ray's `ControllerError`
                with its text.
        """
        if self._coordinator is not None or not self._enabled or self._stands_back(train_run_context):
            return
        filesystem, path = _ray_compat.storage_filesystem(train_run_context), _ray_compat.run_path(train_run_context)
        warn_of_settings(train_run_context, filesystem, path)
        context = ray.get_runtime_context()
        run = replace(run_identity(filesystem, path), rebuild=_ray_compat.filesystem_maker(train_run_context))
        driver = DriverIdentity(*self._shipped_by, context.get_job_id(), time.time())
        self._coordinator = claim(
            run.digest,
            lambda: start_coordinator(
                run, self._config, context.get_node_id(), self._persist, resume=self._resume, driver=driver
            ),
            called=f"Run {run.name!r} ({path})",
        )
        # Finds living stores now: their orphan timeout must not pass while the run waits for resources.
        self._coordinator.open.remote()

    def _stands_back(self, train_run_context: Any) -> bool:
        """Whether another manager counts: the first one of RunConfig does."""
        managers = [one for one in _ray_compat.callbacks_of(train_run_context) if isinstance(one, CheckpointManager)]
        if not managers or managers[0]._id == self._id:
            return False
        warnings.warn(
            f"RunConfig(callbacks=...) has a CheckpointManager, which counts; this {type(self).__name__} and its "
            "settings do not. Give one only.",
            RuntimeWarning,
            stacklevel=2,
        )
        return True

    async def before_controller_shutdown(self) -> None:
        """Training has ended: waits until what is due is on storage, at most twice `PersistConfig.timeout_s`.

        Raises:
            PersistError: It is not. The run ends with this error, unless it ends with another one already.
        """
        start = time.perf_counter()
        try:
            await self._settle()
        finally:
            self.times.add("before_controller_shutdown", time.perf_counter() - start)

    async def _settle(self) -> None:
        if self._coordinator is None or self._persist is None:
            return
        bound = 2 * self._persist.timeout_s + FINISH_TIMEOUT_S
        try:
            problem = await asyncio.wait_for(self._coordinator.settle.remote(), bound)
        except Exception as error:
            problem = f"the run's coordinator did not say what is on storage: {error!r}"
        if problem:
            raise PersistError(f"Training has ended, and not all of it is on storage: {problem}")

    @safe
    def after_controller_finish(self, result: Any) -> None:
        """A run that ended well needs its stores no more; those of one that failed wait for a new driver.

        Waits for the coordinator, at most 20 s: nothing comes after it.
        """
        self._finish(keep=result.error is not None)

    @safe
    def before_controller_abort(self) -> None:
        """The stores stay for a while: the run may be started again. Waits for the coordinator, at most 20 s."""
        self._finish(keep=True)

    def _finish(self, keep: bool) -> None:
        """Ends the coordinator too: the controller's process, its owner, lives on until the driver lets go of it."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            try:
                ray.get(coordinator.finish.remote(keep=keep, hooks=self.times.summary()), timeout=FINISH_TIMEOUT_S)
            finally:
                ray.kill(coordinator)

    # Reports.

    @safe
    def after_report(self, training_report: Any, metrics: Any) -> None:
        """Notes what was reported with a checkpoint, as the report had it."""
        checkpoint = training_report.checkpoint
        if checkpoint is not None:
            found = encode(put_back(kept(training_report.metrics)))
            self._record("reported", path=checkpoint.path, metrics=found, validation=bool(training_report.validation))

    # Worker groups.

    @safe
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Notes the time."""
        self._record("worker_group_start")

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Asks for the restore decision while the workers still have to start JAX. Returns no arguments."""
        self._ask_for_decision(workers)
        return {}

    @safe
    def _ask_for_decision(self, workers: list[Any]) -> None:
        self._decision, self._failed, self._passed_on = None, False, None
        self._record("workers_ready", num_workers=len(workers))
        if self._coordinator is not None:
            members = group_members(workers, self._config)
            self._decision = self._coordinator.begin_attempt.remote(members)
            warn_of_few_domains(members, self._config.copies)

    @contextlib.contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        """After all other callbacks, the backend's set-up among them, and before the train function: hands over.

        A manager of `RAY_TRAIN_CALLBACKS` is called before the backend is, which has to come before JAX is imported.
        """
        self._group = None
        yield
        self._hand_over()

    @safe
    def after_worker_group_start(self, worker_group: Any) -> None:
        """Notes the time, and the group."""
        self._group = worker_group
        self._record("backend_ready")

    @safe
    def _hand_over(self) -> None:
        """Sends each worker two calls, which it runs in order and before the train function: arm, and decide.

        The second one waits for the decision. If that fails the worker stays armed, and its train function raises when
        it asks for the checkpoint instead of starting afresh.
        """
        group, self._group = self._group, None
        if group is not None and self._coordinator is not None:
            wiring = start_hook.Wiring(self._coordinator, self._config, self._persist)
            group.execute_async(start_hook.arm, wiring)
            if self._decision is not None:
                group.execute_async(start_hook.decide, self._decision)
        elif group is not None and not self._enabled:
            group.execute_async(start_hook.turn_off)

    @safe
    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Notes the time."""
        self._record("training_start")

    @safe
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Notes the first failure that the controller sees of a group, and passes on who is preempted and who is gone.

        Ray goes on polling while it waits for a preemption's deadline and grace.
        """
        self._pass_on(worker_group_status)
        errors = _ray_compat.failures_of(worker_group_status)
        if errors and not self._failed:
            self._failed = True
            if self._coordinator is not None:
                self._coordinator.failed.remote(_ray_compat.crash_of(worker_group_status))
            self._record("worker_group_failed", errors={rank: text[:500] for rank, text in errors.items()})

    def _pass_on(self, worker_group_status: Any) -> None:
        news = _ray_compat.preemption_of(worker_group_status), _ray_compat.dead_ranks(worker_group_status)
        if self._coordinator is None or news == self._passed_on:
            return
        (preemption, dead), self._passed_on = news, news
        if preemption is not None:
            self._coordinator.preempted.remote(*preemption)
        if dead:
            self._coordinator.gone.remote(tuple(dead))

    @safe
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Notes the time. After a good end lets the workers store their last snapshot, if it is to be written.

        Only then it waits, for the workers, at most `SnapshotConfig.timeout_s` and 20 s: they are ended next.
        """
        self._record("worker_group_stopping")
        if self._coordinator is not None and self._persist is not None and _ray_compat.ended_well(worker_group):
            timeout_s = self._config.timeout_s
            last = worker_group.execute_async(start_hook.store_last, timeout_s)
            ray.wait(last, num_returns=len(last), timeout=timeout_s + FINISH_TIMEOUT_S)

    @safe
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Notes the time."""
        self._record("worker_group_shutdown")

    def _record(self, event: str, **fields: Any) -> None:
        if self._coordinator is not None:
            self._coordinator.record.remote(event, time.time(), fields)


class EnvCheckpointManager(CheckpointManager):
    """A `CheckpointManager` with the settings of environment variables, for runs whose script is not to be changed.

    `RAY_TRAIN_CALLBACKS=ray_jax_ckpt.EnvCheckpointManager` in the driver's environment adds it. `SnapshotConfig(field)`
    is `RAY_JAX_CKPT_SNAPSHOT_<FIELD>`, `PersistConfig(field)` is `RAY_JAX_CKPT_PERSIST_<FIELD>` (any of them has the
    stores write), and there are `RAY_JAX_CKPT_RESUME` and `RAY_JAX_CKPT_RESUME_FROM`. A `CheckpointManager` in
    RunConfig counts instead of it, with a warning.

    Raises:
        ConfigError: A variable has no such setting, or a value that cannot work. The message names it.
    """

    def __init__(self) -> None:
        found = read_settings()
        mode: Any = found.resume
        super().__init__(found.snapshot, found.persist, resume=mode, resume_from=found.resume_from)


def _got(found: Any) -> str:
    if isinstance(found, type):
        return f"got the class {found.__name__}; make one: {found.__name__}()"
    return f"got {found!r:.100} of type {type(found).__name__}"


def _place(resume_from: Any) -> str | None:
    if resume_from is None:
        return None
    try:
        place = os.fspath(resume_from)
        # The coordinator has another working directory.
        return place if "://" in place else os.path.abspath(place)
    except TypeError:
        raise ConfigError(
            f"CheckpointManager(resume_from=...) takes a path or URI, got {type(resume_from).__name__}. Of a "
            "ray.train.Checkpoint give its path."
        ) from None


def warn_of_settings(train_run_context: Any, filesystem: Any, path: str) -> None:
    """Of what is seldom meant."""
    if _ray_compat.max_failures(train_run_context) == 0:
        warnings.warn(
            "FailureConfig(max_failures=0), Ray's default: nothing will restart after a failure, and no snapshot "
            "will be restored before the run is started again. Set "
            "RunConfig(failure_config=FailureConfig(max_failures=...)).",
            RuntimeWarning,
            stacklevel=1,
        )
    if "local" in filesystem.type_name and not os.path.isabs(path):
        warnings.warn(
            f"The run's storage path {path!r} is relative: every process takes it from a working directory of its "
            "own. Give RunConfig an absolute storage_path.",
            RuntimeWarning,
            stacklevel=1,
        )
