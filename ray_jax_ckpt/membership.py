"""Who a worker group is made of, and what its failure domains are good for."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Member


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
        spread = "Spread the workers over more nodes (ScalingConfig(placement_strategy='SPREAD')), or ask for"
        if len(members) == 1:
            spread = "One worker cannot be spread: ask for"
        covered = "the death of worker processes" if found == 1 else f"the loss of {found - 1} of them"
        warnings.warn(
            f"copies={copies}, but the workers, {len(members)} in all, are in {found} failure "
            f"domain{'s' * (found != 1)}, such as nodes: "
            f"snapshots survive {covered}, and no more. {spread} copies={found}.",
            RuntimeWarning,
            stacklevel=1,
        )
