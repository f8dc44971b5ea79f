"""A Ray cluster of a head and two nodes on this machine, gone when the benchmark ends."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
NUM_NODES = 2
OBJECT_STORE_BYTES = 100 * 2**20

_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def prepare_environment() -> None:
    """Sets what Ray reads when it is imported, and lets its workers import the package and these modules."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    paths = [str(BENCHMARKS.parent), str(BENCHMARKS)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Machines:
    """The cluster: process ids of its raylets, and a folder for runs that goes with it."""

    raylets: tuple[int, ...]
    work: Path


@contextlib.contextmanager
def own_cluster(num_gpus: int = 0) -> Iterator[Machines]:
    """Starts the cluster and connects to it. Nothing of it stays when the context is left, also on Ctrl-C.

    Args:
        num_gpus: Of the first node.
    """
    # A short path: Unix socket names are limited. RAY_TMPDIR keeps Ray's note of the "current" cluster apart, too.
    folder = Path(tempfile.mkdtemp(prefix="rjcb-"))
    before, os.environ["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR"), str(folder / "r")
    (folder / "r").mkdir()
    cluster: Any = None
    try:
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = [
            cluster.add_node(
                num_cpus=1, num_gpus=0 if i else num_gpus, object_store_memory=OBJECT_STORE_BYTES, wait=False
            )
            for i in range(NUM_NODES)
        ]
        cluster.wait_for_nodes(timeout=120)
        # Ray Train's clean-up asks "the" cluster of the machine, and must not ask somebody else's.
        environment = {"env_vars": {"RAY_ADDRESS": cluster.address}}
        ray.init(address=cluster.address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
        # Ray has put its own handler there, which ends the process without any clean-up.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        raylets = tuple(_raylet_pid(node) for node in (cluster.head_node, *nodes))
        yield Machines(raylets, folder)
    finally:
        if cluster is not None:
            import ray

            ray.shutdown()
            cluster.shutdown()
        os.environ.pop("RAY_TMPDIR")
        if before is not None:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def fit(trainer: Any) -> None:
    """Trains. Ray's driver reports dead workers on stdout, which is the tables'.

    Raises:
        Exception: What a train function raised.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit()


def _raylet_pid(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid
