"""Fault injection, for tests of training code as much as for tests of this package.

These functions kill for real and at once, as a machine does that loses power: no signal handler runs, nothing is
flushed, no peer is told. They act on processes of THIS machine, so they fit clusters that a test starts itself, for
example with `ray.cluster_utils.Cluster`, where every "node" is a raylet and its child processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import psutil


def kill_process(pid: int, *, timeout_s: float = 10.0) -> None:
    """Kills one process with SIGKILL and returns when it runs no more (a zombie counts as gone).

    Args:
        pid: Process on this machine, for example a training worker's `os.getpid()`.
        timeout_s: Longest time to wait for the process to go.

    Raises:
        ProcessLookupError: No such process.
        TimeoutError: The process still runs after `timeout_s`.
    """
    try:
        process = psutil.Process(pid)
        process.kill()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"cannot kill process {pid}: it does not exist") from None
    _wait_until_gone([process], timeout_s)


def kill_node(node: Any, *, timeout_s: float = 20.0) -> list[int]:
    """Kills a Ray node as a power cut would: the raylet and every process under it, together.

    `ray.cluster_utils.Cluster.remove_node` kills the raylet alone; actor processes of that node go on running and
    serving their sockets for a long time. Here all of them are stopped first (SIGSTOP), so that none can notice the
    death of another, send a last message or start a new process, and then killed (SIGKILL).

    The cluster learns of the death by itself: from the broken connection, or from missed health checks.

    Args:
        node: What `ray.cluster_utils.Cluster.add_node` returned, or a node id as `ray.nodes()` lists it (hexadecimal).
            The node must run on this machine and must not be the one the calling driver is connected to.
        timeout_s: Longest time to wait for the processes to go.

    Returns:
        Ids of all killed processes, the raylet's first.

    Raises:
        ProcessLookupError: No raylet of that node runs on this machine.
        ValueError: The calling driver is connected to that node: it would lose Ray itself.
        TimeoutError: A process still runs after `timeout_s`.
    """
    node_id = node if isinstance(node, str) else node.node_id
    _refuse_own_node(node_id)
    victims = _freeze(_find_raylet(node_id))
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_until_gone(victims, timeout_s)
    return [process.pid for process in victims]


def _refuse_own_node(node_id: str) -> None:
    import ray

    if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node_id:
        raise ValueError(f"cannot kill node {node_id}: the calling driver is connected to it; kill another node")


def _find_raylet(node_id: str) -> psutil.Process:
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and f"--node_id={node_id}" in (process.info["cmdline"] or []):
            return process
    raise ProcessLookupError(f"cannot kill node {node_id}: no raylet of it runs on this machine")


def _freeze(root: psutil.Process) -> list[psutil.Process]:
    """Stops a process and its descendants, and looks again until none was forked in between."""
    frozen: dict[int, psutil.Process] = {}
    found = [root]
    while found:
        for process in found:
            frozen[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        found = [child for child in _descendants(root) if child.pid not in frozen]
    return list(frozen.values())


def _descendants(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_until_gone(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [process.pid for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} still run {timeout_s} s after SIGKILL; raise timeout_s")
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    # A zombie executes nothing and holds no memory or socket; only its parent can make the entry vanish.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
