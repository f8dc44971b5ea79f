"""How the worker processes of a Ray Train run become one JAX program, and stop being one.

Runs in the controller process, which never imports JAX.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import Backend
from ray.train.v2.jax.config import JaxConfig as RayJaxConfig

from ray_jax_ckpt import _jax_process
from ray_jax_ckpt._ray_compat import (
    RayJaxBackend,
    WorkerGroupStartupFailedError,
    disown_started_state,
    ended_well,
    get_address_and_port,
    num_nodes_of,
    preemption_grace_s,
    scaling_config_of,
)
from ray_jax_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from ray_jax_ckpt.trainer import JaxConfig

logger = logging.getLogger(__name__)

# A preempted node may be gone, and silent, long before its deadline: notices are given up to two minutes ahead.
GRACE_MARGIN_S = 120


class JaxBackend(Backend):
    """Starts and stops JAX on the workers. Stateless: Ray keeps one instance per process."""

    def on_start(self, worker_group: Any, backend_config: JaxConfig) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Prepare every worker, then let them join each other. Blocks the controller until they have.

        Raises:
            ConfigError: The workers disagree about the platform.
            WorkerGroupStartupFailedError: They did not reach each other. Ray starts a new group.
        """
        try:
            platform = _prepare(worker_group, backend_config)
            if platform == "tpu":
                _start_as_ray_does(worker_group)
            elif len(worker_group) > 1:
                _join(worker_group, backend_config)
        except BaseException:
            disown_started_state(worker_group)
            raise

    def on_shutdown(self, worker_group: Any, backend_config: JaxConfig) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Leave in good order after a good end; do nothing after a failure. Never raises.

        Leaving waits for all processes. After a failure the survivors would wait for the dead one, and Ray, whose own
        shutdown call queues behind that on each worker, waits 5 s for them before it kills them as it does anyway.
        """
        try:
            if ended_well(worker_group):
                ray.get(worker_group.execute_async(_jax_process.leave), timeout=backend_config.shutdown_timeout_s)
        except Exception as error:
            logger.debug("The workers did not leave in good order, and are killed: %s", error)


def wanted_platform(config: JaxConfig, scaling_config: Any) -> tuple[str | None, bool]:
    """What the controller knows about the platform, and whether that counts against the workers' JAX_PLATFORMS too."""
    if config.platform is not None:
        return config.platform, True
    for name, attribute in (("tpu", "use_tpu"), ("cuda", "use_gpu")):
        if getattr(scaling_config, attribute, False):
            return name, True
        if getattr(config, attribute):
            return name, False
    return None, False


def _prepare(worker_group: Any, config: JaxConfig) -> str:
    platform, overrides = wanted_platform(config, scaling_config_of(worker_group))
    process_config = _jax_process.ProcessConfig(
        platform=platform,
        overrides_environment=overrides,
        num_nodes=num_nodes_of(worker_group),
        compilation_cache_dir=config.compilation_cache_dir,
    )
    started = time.monotonic()
    platforms = worker_group.execute(_jax_process.prepare, process_config)
    logger.debug("Prepared %d workers in %.2f s.", len(platforms), time.monotonic() - started)
    if len(set(platforms)) > 1:
        raise ConfigError(
            f"the workers would run on different platforms, by rank: {platforms}. Their JAX_PLATFORMS differ. "
            "Set JaxConfig(platform=...)."
        )
    return platforms[0]


def _start_as_ray_does(worker_group: Any) -> None:
    """TPU: also with one worker, and with the variables that tie several slices together."""
    RayJaxBackend().on_start(worker_group, RayJaxConfig(use_tpu=True))
    worker_group.execute(_jax_process.settle, "tpu")


def _join(worker_group: Any, config: JaxConfig) -> None:
    host, port = worker_group.execute_single(0, get_address_and_port)
    coordination = _jax_process.Coordination(
        address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        num_processes=len(worker_group),
        initialization_timeout_s=config.initialization_timeout_s,
        heartbeat_timeout_s=_heartbeat_timeout_s(worker_group, config),
        shutdown_timeout_s=config.shutdown_timeout_s,
    )
    started = time.monotonic()
    refs = {
        worker_group.execute_single_async(rank, _jax_process.join, coordination, rank): rank
        for rank in range(len(worker_group))
    }
    _raise_first_failure(refs, coordination)
    logger.debug("Joined %d workers in %.2f s.", len(refs), time.monotonic() - started)


def _heartbeat_timeout_s(worker_group: Any, config: JaxConfig) -> int:
    """Long enough that JAX does not end the survivors of a preemption within the grace that Ray gives them."""
    grace_s = preemption_grace_s(worker_group)
    return max(config.heartbeat_timeout_s, math.ceil(grace_s) + GRACE_MARGIN_S if grace_s > 0 else 0)


def _raise_first_failure(refs: dict[Any, int], coordination: _jax_process.Coordination) -> None:
    """Wait for all, but not for the others once one has failed: they would wait for it until their own time is up."""
    deadline = time.monotonic() + coordination.initialization_timeout_s + 30
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _not_joined(sorted(refs[ref] for ref in pending), coordination, "no answer")
        try:
            reason = ray.get(ready[0])
        except RayActorError as error:
            reason = str(error)
        if reason is not None:
            raise _not_joined([refs[ready[0]]], coordination, reason)


def _not_joined(ranks: list[int], coordination: _jax_process.Coordination, reason: str) -> Exception:
    return WorkerGroupStartupFailedError(
        f"ranks {ranks} did not join the {coordination.num_processes} processes of the JAX coordination service at "
        f"{coordination.address}, within at most {coordination.initialization_timeout_s} s "
        f"(JaxConfig(initialization_timeout_s=...)): {reason}"
    )
