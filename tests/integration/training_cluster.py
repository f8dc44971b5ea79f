"""Clusters that stock `JaxTrainer` runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@contextlib.contextmanager
def training_cluster(
    num_nodes: int, *modules: ModuleType, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A head that never trains, and nodes with room for one worker each.

    Args:
        num_nodes: Beside the head.
        modules: Of tests, that workers run functions of.
        environment: Of all its processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        # The controller unpickles the callback, and imports this package for it.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            for _ in range(num_nodes):
                cluster.add_node(**NODE, wait=False)
            cluster.wait_for_nodes()
            # Ray Train's clean-up asks "the" cluster of this machine, which may be another one.
            ray.init(
                address=cluster.address,
                runtime_env={"env_vars": {"RAY_ADDRESS": cluster.address}},
                log_to_driver=False,
            )
            yield cluster
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
            ray.shutdown()
            cluster.shutdown()
