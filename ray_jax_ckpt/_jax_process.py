"""One worker process as part of a JAX program: what it runs on, which devices, joining and leaving the others.

The functions `prepare`, `join` and `leave` run on the main thread of a Ray Train worker, before and after the train
function. The others are pure.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ray_jax_ckpt import _compilation_cache
from ray_jax_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

PLATFORMS_VARIABLE = "JAX_PLATFORMS"
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """What every process of a group is told.

    Attributes:
        platform: What to run on; None where the process itself decides by its JAX_PLATFORMS.
        overrides_environment: Whether `platform` also counts where JAX_PLATFORMS names something else.
        num_nodes: Nodes that hold processes of the group.
        compilation_cache_dir: See `_compilation_cache.configure`.
    """

    platform: str | None
    overrides_environment: bool
    num_nodes: int
    compilation_cache_dir: str | None


@dataclasses.dataclass(frozen=True)
class Coordination:
    """How the processes of a group find each other and how long they wait, in whole seconds as JAX takes them."""

    address: str
    num_processes: int
    initialization_timeout_s: int
    heartbeat_timeout_s: int
    shutdown_timeout_s: int


def jax_platforms(wanted: str | None, *, overrides: bool, environment: str) -> str:
    """The value that JAX_PLATFORMS shall have.

    Args:
        wanted: The platform asked for, None for no wish.
        overrides: Whether the wish also counts against an environment that says something else.
        environment: What JAX_PLATFORMS is, "" where it is unset.

    Returns:
        The environment's value wherever it allows what is wanted (it may add platforms: "cuda,cpu"), "cpu" where
        neither says anything.
    """
    present = [name.strip() for name in environment.lower().split(",") if name.strip()]
    names = {"cuda", "gpu"} if wanted == "cuda" else {wanted}
    if wanted is not None and not names.intersection(present) and (overrides or not present):
        return wanted
    return ",".join(present) or "cpu"


def main_platform(platforms: str) -> str:
    """The platform that JAX takes by default, in this package's words ("cuda" for "gpu")."""
    first = platforms.split(",")[0]
    return "cuda" if first == "gpu" else first


def cuda_devices(visible: str | None, assigned: Sequence[str]) -> tuple[str | None, list[int] | None]:
    """Which GPUs a process uses, given what Ray assigned to it.

    Ray masks the others by CUDA_VISIBLE_DEVICES, and JAX counts inside that mask. Overwriting the mask with 0..n-1, as
    Ray's own JaxConfig does, puts two one-GPU workers of a node on the same GPU.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the process, None where it is unset (Ray was told not to set it).
        assigned: The ids of the GPUs that Ray assigned to the worker.

    Returns:
        The value to give to CUDA_VISIBLE_DEVICES (None: leave it), and the ids for JAX (None: all that are visible).
    """
    if visible is None:
        return (",".join(assigned), list(range(len(assigned)))) if assigned else (None, None)
    shown = [name.strip() for name in visible.split(",") if name.strip()]
    if assigned and set(assigned) < set(shown):
        # The mask is wider than what this worker may use: Ray was told not to narrow it.
        return None, [shown.index(name) for name in assigned]
    return None, list(range(len(shown)))


def prepare(config: ProcessConfig) -> str:
    """Set this process up so that JAX, imported from here on, takes the right platform, devices and cache.

    On TPU JAX is left unimported: Ray's own set-up comes next and may set variables that must be there first.

    Returns:
        What JAX will run on: "cpu", "cuda", "tpu" or another name that JAX knows.
    """
    platforms = _choose_platforms(config)
    platform = main_platform(platforms)
    if platform == "cuda":
        _choose_cuda_devices()
    _compilation_cache.configure(config.compilation_cache_dir, platform=platform, num_nodes=config.num_nodes)
    if platform != "tpu":
        started = time.monotonic()
        _import_jax(platforms)
        settle(platform)
        logger.debug("Imported JAX for %s in %.2f s.", platforms, time.monotonic() - started)
    return platform


def _choose_platforms(config: ProcessConfig) -> str:
    environment = os.environ.get(PLATFORMS_VARIABLE, "")
    platforms = jax_platforms(config.platform, overrides=config.overrides_environment, environment=environment)
    if environment and platforms != environment.lower().replace(" ", ""):
        logger.warning(
            "JAX runs on %s although %s=%s: JaxConfig or ScalingConfig asks for it. JaxConfig(platform=...) chooses.",
            platforms,
            PLATFORMS_VARIABLE,
            environment,
        )
    os.environ[PLATFORMS_VARIABLE] = platforms
    return platforms


def _choose_cuda_devices() -> None:
    visible = os.environ.get(CUDA_VARIABLE)
    if visible is not None and not visible.strip():
        raise ConfigError(
            "JAX is to run on cuda, but Ray assigned no GPU to this worker. Set ScalingConfig(use_gpu=True), or "
            "JaxConfig(platform='cpu')."
        )
    mask, local = cuda_devices(visible, _assigned_gpus())
    if mask is not None:
        os.environ[CUDA_VARIABLE] = mask
    if local is not None:
        # Read at JAX's import, so that a single process, which joins nobody, is restricted too.
        os.environ["JAX_CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in local)
    logger.debug("GPUs: %s=%s, JAX takes %s of these.", CUDA_VARIABLE, os.environ.get(CUDA_VARIABLE), local)


def _assigned_gpus() -> list[str]:
    import ray

    return [str(name) for name in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _import_jax(platforms: str) -> None:
    import jax

    # Where something imported JAX before, it has read the environment already.
    if getattr(jax.config, "jax_platforms", None) != platforms:
        jax.config.update("jax_platforms", platforms)
    visible = os.environ.get("JAX_CUDA_VISIBLE_DEVICES")
    if visible is not None and main_platform(platforms) == "cuda":
        jax.config.update("jax_cuda_visible_devices", visible)


def join(coordination: Coordination, process_id: int) -> str | None:
    """Join the other processes. Blocks until all of them are there, at most `initialization_timeout_s`.

    On CPU, JAX's default implementation of collectives (gloo) connects the processes.

    Returns:
        None, or why the others were not reached. Returned, not raised: the type of the error lives in jaxlib, which the
        controller need not have.
    """
    import jax

    started = time.monotonic()
    if process_id != 0:
        _wait_for_coordinator(coordination)
    try:
        jax.distributed.initialize(
            coordination.address,
            coordination.num_processes,
            process_id,
            local_device_ids=_local_device_ids(),
            # Everything is known. Detection would find the batch system that Ray itself was started from.
            cluster_detection_method="deactivate",
            initialization_timeout=coordination.initialization_timeout_s,
            heartbeat_timeout_seconds=coordination.heartbeat_timeout_s,
            shutdown_timeout_seconds=coordination.shutdown_timeout_s,
        )
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    logger.debug("Joined %d processes in %.2f s.", coordination.num_processes, time.monotonic() - started)
    return None


def _wait_for_coordinator(coordination: Coordination) -> None:
    """Return once process 0 listens, or once the time is up: the attempt that follows then says why.

    JAX's client backs off for about a second when it comes too early, which is most of the time.
    """
    host, port = coordination.address.rsplit(":", 1)
    deadline = time.monotonic() + coordination.initialization_timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 5.0)):
            return
        time.sleep(0.02)


def _local_device_ids() -> list[int] | None:
    names = os.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    return None if names in ("", "all") else [int(name) for name in names.split(",")]


def settle(platform: str) -> None:
    """What is left to do once JAX is imported, here or (on TPU) by Ray's own set-up."""
    _compilation_cache.write_entries_atomically()
    if _compilation_cache.shall_write(platform=platform, local_rank=_local_rank()):
        _compilation_cache.write_here()


def _local_rank() -> int:
    import ray.train

    return ray.train.get_context().get_local_rank() or 0


def leave() -> None:
    """Leave the other processes in good order. Blocks until all of them leave; a no-op where none were joined."""
    if (jax := sys.modules.get("jax")) is not None and jax.distributed.is_initialized():
        jax.distributed.shutdown()
