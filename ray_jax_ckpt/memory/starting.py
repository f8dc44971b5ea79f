"""Starts a run's coordinator."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_jax_ckpt.config import PersistConfig, SnapshotConfig
from ray_jax_ckpt.memory.claim import DriverIdentity, coordinator_name, this_controller
from ray_jax_ckpt.memory.coordinator import Coordinator
from ray_jax_ckpt.memory.fleet import NAMESPACE
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.model.choice import Resume

# Calls that meet a coordinator while it is started again wait for it, instead of costing an attempt.
MAX_TASK_RETRIES = 3
# All ranks may wait in the coordinator at once while their stores' reports have to get through.
MAX_CONCURRENT_CALLS = 100_000


def start_coordinator(
    run: RunIdentity,
    config: SnapshotConfig,
    node_id: str,
    persist: PersistConfig | None = None,
    *,
    resume: Resume = Resume(),  # noqa: B008  # frozen
    driver: DriverIdentity | None = None,
) -> ActorHandle:
    """Starts a run's coordinator on a node, owned by the calling process. Ray starts it again if it is killed.

    With a `driver` it has the run's name (see `claim`); raises ValueError if another one has it.
    """
    named = {} if driver is None else {"name": coordinator_name(run.digest), "namespace": NAMESPACE}
    actor: Any = ray.remote(Coordinator).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        max_concurrency=MAX_CONCURRENT_CALLS,
        max_restarts=-1,
        max_task_retries=MAX_TASK_RETRIES,
        **named,
    )
    return actor.remote(run, config, persist, resume, driver, this_controller())
