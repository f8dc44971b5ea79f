"""A cluster of two nodes, and a training process of a group of one: this one."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from support import local_cluster, new_run

from ray_jax_ckpt import session
from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Member, RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster(1) as cluster:
        yield cluster


@dataclasses.dataclass
class Attempts:
    """Starts of a worker group of one, as the manager's hooks make them. Each replaces the one before."""

    node: tuple[str, str]
    patch: pytest.MonkeyPatch
    run: str = dataclasses.field(default_factory=new_run)
    coordinator: Any = None

    def begin(self, **settings: Any) -> session.Session:
        """A new attempt; settings are those of SnapshotConfig, and count from the first attempt on."""
        config = SnapshotConfig(**{"every_n_steps": 1, "copies": 1, "timeout_s": 20} | settings)
        if self.coordinator is None:
            identity = RunIdentity(self.run, f"/nowhere/{self.run}", None)
            self.coordinator = start_coordinator(identity, config, self.node[0])
        members = (Member(0, *self.node, 0, self.node[0]),)
        decision = ray.get(self.coordinator.begin_attempt.remote(members), timeout=60)
        one = session.Session(session.Wiring(self.coordinator, config), decision, 0)
        self.patch.setattr(session, "_current", one)
        return one

    def store(self) -> Any:
        """The store that has the rank's name now."""
        return next(iter(fleet.living_stores(self.run).values()))

    def kill_store(self) -> None:
        os.kill(ray.get(self.store().pid.remote(), timeout=30), signal.SIGKILL)

    def held_steps(self) -> set[int]:
        """Steps of which the store holds something that may not be freed."""
        inventory = ray.get(self.store().inventory.remote(), timeout=30)
        return {report.generation.step for report in inventory.held}

    def close(self) -> None:
        if self.coordinator is not None:
            ray.kill(self.coordinator)
        for handle in fleet.living_stores(self.run).values():
            ray.kill(handle)


@pytest.fixture
def attempts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    """On the node that this process is connected to, whose stores' memory it can map."""
    head = next(node for node in ray.nodes() if node["NodeID"] == cluster.head_node.node_id)
    found = Attempts((head["NodeID"], head["NodeManagerAddress"]), monkeypatch)
    try:
        yield found
    finally:
        found.close()
