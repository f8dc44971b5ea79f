"""A cluster of two nodes, and a training process of a group of one: this one."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from ray_jax_ckpt import session
from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.coordinator import RunIdentity, start_coordinator
from ray_jax_ckpt.memory.messages import Member


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nodes without CPUs: stores and coordinators need none, and Ray then starts no idle workers."""
    with warnings.catch_warnings():
        # JAX runs in this process; what Ray forks off executes another program at once.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        cluster.add_node(num_cpus=0)
        ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclasses.dataclass
class Attempts:
    """Starts of a worker group of one, as the manager's hooks make them. Each replaces the one before."""

    node: tuple[str, str]
    patch: pytest.MonkeyPatch
    run: str = dataclasses.field(default_factory=lambda: f"test{uuid.uuid4().hex[:8]}")
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


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Waits for a condition, and returns its value."""

    def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s"
            time.sleep(0.05)
        return value

    return wait_for
