"""The stores of a run: their names, how they are created on a node, and how those that live are found again."""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Iterable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.annotations import RayDeprecationWarning
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_jax_ckpt.memory.messages import Member, StoreSettings
from ray_jax_ckpt.memory.store import ReplicaStore, StoreOptions

logger = logging.getLogger(__name__)

NAMESPACE = "ray_jax_ckpt"
# A store answers many callers at once, and some of them wait inside: for a buffer, for a peer, for a digest.
MAX_CONCURRENT_CALLS = 64
NAME_POLL_S = 0.05
TPU_SLICE_LABEL = "ray.io/tpu-slice-name"


def run_digest(filesystem: str, run_path: str) -> str:
    """Identity of a run: the kind (and endpoint, without credentials) of its filesystem and its path there."""
    return hashlib.sha256(f"{filesystem}\n{run_path}".encode()).hexdigest()[:16]


def store_name(run: str, member: Member) -> str:
    """Name of the store of the run's `index`-th worker on a node. Needs no memory of earlier attempts to be found."""
    return f"{run}:{member.node_id[:16]}:{member.index}"


def node_of(store: str, nodes: Iterable[str]) -> str | None:
    """Which of these nodes a store is on, by its name; None for another one."""
    return next((node for node in nodes if store.split(":")[1] == node[:16]), None)


def living_stores(run: str) -> dict[str, ActorHandle]:
    """Handles of the run's detached stores, by name, whoever created them.

    Some may have died without Ray knowing yet.
    """
    found = {}
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    for actor in named:
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{run}:"):
            try:
                found[actor["name"]] = ray.get_actor(actor["name"], namespace=NAMESPACE)
            except ValueError:
                logger.debug("Store %s ended while it was looked up.", actor["name"])
    return found


def create_store(
    run: str,
    member: Member,
    secret: str,
    attempt: int,
    orphan_timeout_s: float,
    timeout_s: float,
    settings: StoreSettings,
) -> ActorHandle:
    """Starts (or finds) the store of a member. Returns at once: calls queue until it is up.

    Detached, so that it outlives workers, controller and driver; on the member's node and nowhere else; no CPUs, no
    accelerator, so that it never competes with training for resources.
    """
    options = StoreOptions(
        name=store_name(run, member),
        node_id=member.node_id,
        node_ip=member.node_ip,
        domain=member.domain,
        slots=2,
        attempt=attempt,
        orphan_timeout_s=orphan_timeout_s,
        timeout_s=timeout_s,
        settings=settings,
    )
    actor: Any = ray.remote(ReplicaStore).options(
        name=options.name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENT_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(member.node_id, soft=False),
    )
    return actor.remote(options, secret)


def end_store(name: str, handle: ActorHandle, timeout_s: float) -> None:
    """Ends a store that seems dead, and waits until its name is free, so that the next one is not taken for it.

    Blocks.
    """
    ray.kill(handle)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(NAME_POLL_S)
    logger.warning("The name of store %s was not given up within %g s.", name, timeout_s)


def failure_domains(nodes: dict[str, dict[str, str]], setting: str, copies: int) -> dict[str, str]:
    """The failure domain of every node.

    Args:
        nodes: Labels of each node, by node id.
        setting: `SnapshotConfig.failure_domain`.
        copies: Copies wanted: "auto" takes TPU slices only if there are that many.

    Returns:
        Domain by node id. A node without the label is a domain of its own.
    """
    if setting == "auto":
        slices = {labels.get(TPU_SLICE_LABEL) for labels in nodes.values()} - {None}
        setting = TPU_SLICE_LABEL if len(slices) >= max(copies, 2) else "node"
    if setting == "node":
        return {node: node for node in nodes}
    return {node: labels.get(setting, node) for node, labels in nodes.items()}


def was_restarted() -> bool:
    """Whether Ray has started the calling actor again after its death."""
    with warnings.catch_warnings():
        # Ray's own property looks up the actor by what Ray has deprecated.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
