"""Killing and stopping processes and whole nodes of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
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
    with _named("kill", pid) as process:
        process.kill()
    _wait_until_gone([process], timeout_s)


def pause_process(pid: int) -> None:
    """Stops one process with SIGSTOP, as a machine does that swaps or whose disk hangs: it lives and does nothing.

    Raises:
        ProcessLookupError: No such process.
    """
    with _named("pause", pid) as process:
        process.suspend()


def resume_process(pid: int) -> None:
    """Lets a paused process go on where it was (SIGCONT).

    Raises:
        ProcessLookupError: No such process.
    """
    with _named("resume", pid) as process:
        process.resume()


def kill_node(node: Any, *, timeout_s: float = 20.0) -> list[int]:
    """Kills a Ray node as a power cut would: the raylet and every process under it, together.

    `ray.cluster_utils.Cluster.remove_node` kills the raylet alone; actor processes of that node go on running and
    serving their sockets for a long time (see `kill_raylet`). Here all of them are stopped first (SIGSTOP), so that
    none can notice the death of another, send a last message or start a new process, and then killed (SIGKILL).

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
    victims = _freeze(_raylet_of(node, "kill"))
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_until_gone(victims, timeout_s)
    return [process.pid for process in victims]


def kill_raylet(node: Any, *, timeout_s: float = 20.0) -> list[int]:
    """Kills a node's raylet alone. To the cluster the node is dead; its workers and actors do not know it yet.

    Such a zombie still computes and writes for a while, while its work has been given to others.

    Args:
        node: As in `kill_node`.
        timeout_s: Longest time to wait for the raylet to go.

    Returns:
        Ids of the processes that the raylet had under it, for the caller to watch.

    Raises:
        ProcessLookupError, ValueError, TimeoutError: As in `kill_node`.
    """
    raylet = _raylet_of(node, "kill the raylet of")
    orphans = _descendants(raylet)
    raylet.kill()
    _wait_until_gone([raylet], timeout_s)
    return [process.pid for process in orphans]


def drain_node(node: Any, *, deadline_s: float = 0.0) -> None:
    """Tells Ray that a node is going to be taken away, as a cloud's preemption notice does.

    Ray places nothing new there from then on. It takes nothing away either, now or at the deadline: `kill_node` does.

    Args:
        node: What `ray.cluster_utils.Cluster.add_node` returned, or a node id (hexadecimal).
        deadline_s: In how many seconds. 0: no deadline is known.

    Raises:
        ValueError: There is no node of that id.
    """
    import ray
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated import autoscaler_pb2

    node_id = node if isinstance(node, str) else node.node_id
    if node_id not in {found["NodeID"] for found in ray.nodes()}:
        raise ValueError(f"cannot drain node {node_id}: the cluster has no node of that id")
    reasons: Any = autoscaler_pb2.DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
    deadline_ms = int((time.time() + deadline_s) * 1000) if deadline_s else 0
    GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(
        node_id, reasons.Value("DRAIN_NODE_REASON_PREEMPTION"), "fault injection", deadline_ms
    )


def pause_node(node: Any) -> list[int]:
    """Stops a node's raylet and every process under it, as a network partition or a frozen virtual machine does.

    The cluster takes it for dead when its health checks have failed for long enough.

    Args:
        node: As in `kill_node`.

    Returns:
        Ids of the stopped processes, the raylet's first: for `resume_process`, in any order.

    Raises:
        ProcessLookupError, ValueError: As in `kill_node`.
    """
    return [process.pid for process in _freeze(_raylet_of(node, "pause"))]


def resume_node(node: Any) -> None:
    """Lets a paused node go on.

    Args:
        node: As in `kill_node`.

    Raises:
        ProcessLookupError, ValueError: As in `kill_node`.
    """
    raylet = _raylet_of(node, "resume")
    for process in [*_descendants(raylet), raylet]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@contextlib.contextmanager
def _named(what: str, pid: int) -> Iterator[psutil.Process]:
    try:
        yield psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"cannot {what} process {pid}: it does not exist") from None


def _raylet_of(node: Any, what: str) -> psutil.Process:
    node_id = node if isinstance(node, str) else node.node_id
    _refuse_own_node(node_id, what)
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and f"--node_id={node_id}" in (process.info["cmdline"] or []):
            return process
    raise ProcessLookupError(f"cannot {what} node {node_id}: no raylet of it runs on this machine")


def _refuse_own_node(node_id: str, what: str) -> None:
    import ray

    if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node_id:
        raise ValueError(f"cannot {what} node {node_id}: the calling driver is connected to it; take another node")


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
