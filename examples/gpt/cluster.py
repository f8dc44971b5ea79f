"""A Ray cluster of several nodes on this one machine, with nodes that may be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
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
    """Sets what Ray reads when it is imported (values the user has set stay), and makes SIGTERM an orderly end."""
    _clean_up_on_sigterm()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def own_cluster(*, num_nodes: int, spare: bool) -> Iterator[Callable[[], None]]:
    """Starts a head node, which never trains, and `num_nodes` nodes with room for one worker each; connects to it.

    With `spare` there is one node more, kept free of workers until the function that the context gives is called: else
    Ray may put a worker there after any failure, away from the snapshots on its own node.

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
        nodes = [
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, wait=False) for _ in range(num_nodes + spare)
        ]
        cluster.wait_for_nodes(timeout=120)
        with connected(cluster.address):
            yield _occupy(nodes[-1].node_id) if spare else lambda: None
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

    environment: dict[str, Any] = {"working_dir": str(EXAMPLES), "excludes": ["**/__pycache__"]}
    if ":" in address:
        # Ray Train's clean-up asks "the" cluster of the machine, and must not ask somebody else's.
        environment["env_vars"] = {"RAY_ADDRESS": address}
    ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING, log_to_driver=True)
    _clean_up_on_sigterm()  # again: Ray has put its own handler there, which ends the process at once
    try:
        yield
    finally:
        ray.shutdown()


def _clean_up_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _occupy(node_id: str) -> Callable[[], None]:
    """Takes the only CPU of a node; returns what gives it back."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Occupant:
        def ready(self) -> None:
            pass

    there: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    occupant: Any = ray.remote(num_cpus=1, scheduling_strategy=there)(Occupant).remote()
    ray.get(occupant.ready.remote(), timeout=120)
    return lambda: ray.kill(occupant)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
