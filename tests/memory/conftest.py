"""A cluster of four nodes without CPUs: stores and coordinators need none, and Ray then starts no idle workers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Shared by a module's tests, which leave its nodes alive."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=0)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> list[tuple[str, str]]:
    """Id and address of the worker nodes."""
    head = cluster.head_node.node_id
    found: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]
    return sorted((node["NodeID"], node["NodeManagerAddress"]) for node in found)


@pytest.fixture
def run() -> str:
    """A run that nobody else uses."""
    return f"test{uuid.uuid4().hex[:8]}"
