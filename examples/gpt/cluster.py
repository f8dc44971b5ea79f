"""A Ray cluster of several nodes on this one machine, with nodes that may be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


def prepare_environment() -> None:
    """Sets what Ray reads when it is imported. Values the user has set stay."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def own_cluster(*, num_nodes: int) -> Iterator[None]:
    """Starts a head node, which never trains, and `num_nodes` nodes with room for one worker each; connects to it.

    All processes and files are gone when the context is left, whatever was killed in between.
    """
    # A short path: Unix socket names are limited to 107 bytes. RAY_TMPDIR and not a `temp_dir` argument: Ray also notes
    # the address of the "current" cluster there, and must not overwrite the note of a cluster that the user runs.
    folder = tempfile.mkdtemp(prefix="gpt-")
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    cluster: Any = None
    try:
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20},
        )
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, wait=False)
        cluster.wait_for_nodes(timeout=120)
        with connected(cluster.address):
            yield
    finally:
        if cluster is not None:
            import ray

            ray.shutdown()
            cluster.shutdown()
        _restore("RAY_TMPDIR", before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this driver to a cluster; workers anywhere get this folder's modules."""
    import ray

    ray.init(
        address=address,
        runtime_env={"working_dir": str(EXAMPLES), "excludes": ["**/__pycache__"]},
        logging_level=logging.WARNING,
        log_to_driver=True,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
