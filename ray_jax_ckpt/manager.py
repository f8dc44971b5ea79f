"""The callback in Ray Train's controller that ties a run to its snapshots."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from ray_jax_ckpt import _ray_compat, start_hook
from ray_jax_ckpt.config import PersistConfig, SnapshotConfig
from ray_jax_ckpt.errors import ConfigError, PersistError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.coordinator import start_coordinator
from ray_jax_ckpt.memory.messages import Member, RunIdentity
from ray_jax_ckpt.run_identity import canonical

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 20.0

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _safe(hook: Hook) -> Hook:
    """A hook that never raises: an exception in one ends the run in spite of `max_failures`."""

    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception:
            logger.exception("CheckpointManager.%s failed; training goes on without what it does.", hook.__name__)
            return None

    return guarded  # pyright: ignore[reportReturnType]


if TYPE_CHECKING:
    # RunConfig is annotated to take this one only; it takes the others as well.
    from ray.train import UserCallback as _Callback
else:

    class _Callback(_ray_compat.ReportCallback, _ray_compat.WorkerGroupCallback, _ray_compat.ControllerCallback):
        """What Ray Train's controller calls."""


class CheckpointManager(_Callback):
    """Keeps snapshots of a run in memory and restores the newest complete one when Ray Train restarts the workers.

    Give it to `RunConfig(callbacks=[CheckpointManager(...)])`. The run is its storage path and name: a new driver with
    the same ones finds what still lives of it. It pickles (Ray ships it to the controller), its hooks never raise and
    never wait for a worker, a store or storage: they only send asynchronous calls to the run's coordinator.

    Args:
        snapshot: What is kept in memory, and how. None: the defaults of `SnapshotConfig`.
        persist: What of it is written to the run's storage, and what stays there. None: nothing.

    Raises:
        ConfigError: An argument is not of its type.
    """

    def __init__(self, snapshot: SnapshotConfig | None = None, persist: PersistConfig | None = None) -> None:
        if not isinstance(snapshot, SnapshotConfig | None):
            raise ConfigError(f"CheckpointManager(snapshot=...) takes a SnapshotConfig, got {type(snapshot).__name__}.")
        if not isinstance(persist, PersistConfig | None):
            raise ConfigError(f"CheckpointManager(persist=...) takes a PersistConfig, got {type(persist).__name__}.")
        self._config, self._persist = snapshot or SnapshotConfig(), persist
        self._coordinator: Any = None
        self._decision: Any = None
        self._failed = False
        self._passed_on: Any = None

    # The controller.

    @_safe
    def after_controller_start(self, train_run_context: Any) -> None:
        """Starts the run's coordinator beside the controller, owned by it."""
        if _ray_compat.max_failures(train_run_context) == 0:
            warnings.warn(
                "FailureConfig(max_failures=0), Ray's default: nothing will restart after a failure, and no snapshot "
                "will be restored before the run is started again. Set "
                "RunConfig(failure_config=FailureConfig(max_failures=...)).",
                RuntimeWarning,
                stacklevel=1,
            )
        filesystem, path = _ray_compat.storage_filesystem(train_run_context), _ray_compat.run_path(train_run_context)
        if "local" in filesystem.type_name and not os.path.isabs(path):
            warnings.warn(
                f"The run's storage path {path!r} is relative: every process takes it from a working directory of its "
                "own. Give RunConfig an absolute storage_path.",
                RuntimeWarning,
                stacklevel=1,
            )
        here = ray.get_runtime_context().get_node_id()
        run = replace(run_identity(filesystem, path), rebuild=_ray_compat.filesystem_maker(train_run_context))
        self._coordinator = start_coordinator(run, self._config, here, self._persist)
        # Finds living stores now: their orphan timeout must not pass while the run waits for resources.
        self._coordinator.open.remote()

    async def before_controller_shutdown(self) -> None:
        """Training has ended: waits until what is due is on storage.

        Raises:
            PersistError: It is not. The run ends with this error, unless it ends with another one already.
        """
        if self._coordinator is None or self._persist is None:
            return
        bound = 2 * self._persist.timeout_s + FINISH_TIMEOUT_S
        try:
            problem = await asyncio.wait_for(self._coordinator.settle.remote(), bound)
        except Exception as error:
            problem = f"the run's coordinator did not say what is on storage: {error!r}"
        if problem:
            raise PersistError(f"Training has ended, and not all of it is on storage: {problem}")

    @_safe
    def after_controller_finish(self, result: Any) -> None:
        """A run that ended well needs its stores no more; those of one that failed wait for a new driver."""
        self._finish(keep=result.error is not None)

    @_safe
    def before_controller_abort(self) -> None:
        """The stores stay for a while: the run may be started again."""
        self._finish(keep=True)

    def _finish(self, keep: bool) -> None:
        """Ends the coordinator too: the controller's process, its owner, lives on until the driver lets go of it."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            try:
                ray.get(coordinator.finish.remote(keep=keep), timeout=FINISH_TIMEOUT_S)
            finally:
                ray.kill(coordinator)

    # Worker groups.

    @_safe
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Notes the time."""
        self._record("worker_group_start")

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Asks for the restore decision while the workers still have to start JAX. Returns no arguments."""
        self._ask_for_decision(workers)
        return {}

    @_safe
    def _ask_for_decision(self, workers: list[Any]) -> None:
        self._decision, self._failed, self._passed_on = None, False, None
        self._record("workers_ready", num_workers=len(workers))
        if self._coordinator is not None:
            members = group_members(workers, self._config)
            self._decision = self._coordinator.begin_attempt.remote(members)
            warn_of_few_domains(members, self._config.copies)

    @_safe
    def after_worker_group_start(self, worker_group: Any) -> None:
        """Sends each worker two calls, which it runs in order and before the train function: arm, and decide.

        The second one waits for the decision. If that fails the worker stays armed, and its train function raises when
        it asks for the checkpoint instead of starting afresh.
        """
        self._record("backend_ready")
        if self._coordinator is not None:
            wiring = start_hook.Wiring(self._coordinator, self._config, self._persist)
            worker_group.execute_async(start_hook.arm, wiring)
            if self._decision is not None:
                worker_group.execute_async(start_hook.decide, self._decision)

    @_safe
    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Notes the time."""
        self._record("training_start")

    @_safe
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Notes the first failure that the controller sees of a group, and passes on who is preempted and who is gone.

        Ray goes on polling while it waits for a preemption's deadline and grace.
        """
        self._pass_on(worker_group_status)
        errors = _ray_compat.failures_of(worker_group_status)
        if errors and not self._failed:
            self._failed = True
            if self._coordinator is not None:
                self._coordinator.failed.remote()
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

    @_safe
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Notes the time. After a good end lets the workers store their last snapshot, if it is to be written."""
        self._record("worker_group_stopping")
        if self._persist is not None and _ray_compat.ended_well(worker_group):
            timeout_s = self._config.timeout_s
            last = worker_group.execute_async(start_hook.store_last, timeout_s)
            ray.wait(last, num_returns=len(last), timeout=timeout_s + FINISH_TIMEOUT_S)

    @_safe
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Notes the time."""
        self._record("worker_group_shutdown")

    def _record(self, event: str, **fields: Any) -> None:
        if self._coordinator is not None:
            self._coordinator.record.remote(event, time.time(), fields)


def group_members(workers: list[Any], config: SnapshotConfig) -> tuple[Member, ...]:
    """The members of a group of Ray Train workers, numbered per node, with their failure domains."""
    used = {worker.metadata.node_id for worker in workers}
    nodes = [node for node in ray.nodes() if node["NodeID"] in used]
    labels: dict[str, dict[str, str]] = {node["NodeID"]: node.get("Labels", {}) for node in nodes}
    warn_of_unknown_label(labels, config.failure_domain)
    domains: dict[str, str] = fleet.failure_domains(labels, config.failure_domain, config.copies)
    seen: dict[str, int] = defaultdict(int)
    members = []
    for rank, worker in enumerate(workers):
        node = worker.metadata.node_id
        members.append(Member(rank, node, worker.metadata.node_ip, seen[node], str(domains.get(node, node))))
        seen[node] += 1
    return tuple(members)


def warn_of_unknown_label(labels: Mapping[str, Mapping[str, str]], setting: str) -> None:
    """Says so when no node has the label that is to name its failure domain: each then is one of its own."""
    if setting not in ("auto", "node") and not any(setting in of_node for of_node in labels.values()):
        known = sorted({key for of_node in labels.values() for key in of_node})
        warnings.warn(
            f"failure_domain={setting!r}: no node of the workers has this label, so every node counts as a failure "
            f"domain of its own. Labels that they have: {', '.join(known) or 'none'}.",
            RuntimeWarning,
            stacklevel=1,
        )


def warn_of_few_domains(members: Sequence[Member], copies: int) -> None:
    """Says so when a group cannot have as many copies in distinct failure domains as were asked for."""
    found = len({member.domain for member in members})
    if found < copies:
        covered = "the death of worker processes" if found == 1 else f"the loss of {found - 1} of them"
        warnings.warn(
            f"copies={copies}, but the workers, {len(members)} in all, are in {found} failure "
            f"domain{'s' * (found != 1)}, such as nodes: "
            f"snapshots survive {covered}, and no more. Spread the workers over more nodes "
            f"(ScalingConfig(placement_strategy='SPREAD')), or ask for copies={found}.",
            RuntimeWarning,
            stacklevel=1,
        )


def run_identity(filesystem: Any, path: str) -> RunIdentity:
    """The run that has its directory there: the same for every driver, and for every spelling of the path."""
    return RunIdentity(fleet.run_digest(*canonical(filesystem, path)), path, filesystem)
