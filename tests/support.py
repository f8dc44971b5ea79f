"""What tests of several directories share: waiting, and clusters on this machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.fs
import ray
from ray.cluster_utils import Cluster

from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError, NotSupportedError
from ray_jax_ckpt.storage.manifest import Manifest
from ray_jax_ckpt.storage.reader import read_manifest
from ray_jax_ckpt.storage.runs import directories, is_temporary


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Waits for a condition and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} not within {timeout_s} s"
        time.sleep(0.05)
    return value


def said_by(process: subprocess.Popen[str]) -> Any:
    """The first line of JSON that a process prints. Ray prints lines of its own among them, whatever it is told."""
    assert process.stdout is not None
    return json.loads(next(line for line in process.stdout if line.startswith(("{", "["))))


def find_checkpoints(filesystem: pyarrow.fs.FileSystem, run_path: str) -> Iterator[tuple[str, Manifest]]:
    """Paths and manifests of the checkpoints that a run's stores have written, in no order, whatever its state says."""
    for path in directories(filesystem, run_path):
        if not is_temporary(path):
            with contextlib.suppress(NoCheckpointError, IntegrityError, NotSupportedError):
                yield path, read_manifest(filesystem, path)


@contextlib.contextmanager
def local_cluster(num_nodes: int, **settings: Any) -> Iterator[Cluster]:
    """A head and nodes without CPUs: stores and coordinators need none, and Ray then starts no idle workers.

    Args:
        num_nodes: Beside the head, which this process is connected to.
        settings: Of every node.
    """
    node = {"num_cpus": 0} | settings
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(num_nodes):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def workers_of(cluster: Cluster) -> list[tuple[str, str]]:
    """Id and address of the living nodes beside the head."""
    head = cluster.head_node.node_id
    found: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]
    return sorted((node["NodeID"], node["NodeManagerAddress"]) for node in found)


def new_run() -> str:
    """A run that nobody else uses."""
    return f"test{uuid.uuid4().hex[:8]}"
