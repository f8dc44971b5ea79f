from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from ray_jax_ckpt.testing import (
    kill_node,
    kill_process,
    kill_raylet,
    pause_node,
    pause_process,
    resume_node,
    resume_process,
)

NODE_ID = "c0ffee" * 9 + "aa"
# A stand-in for a raylet: it has the name, the argument and a tree of children that survive their parent's death.
RAYLET = """
import subprocess, sys, time
sleep = "time.sleep(60)"
child = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; {sleep}']); {sleep}"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, start_new_session=True)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_kill_process_returns_when_it_is_gone() -> None:
    with process(sys.executable, "-c", "import time; time.sleep(60)") as child:
        kill_process(child.pid)
        assert child.wait(1) == -signal.SIGKILL


def test_kill_process_names_a_missing_process() -> None:
    with process("true") as child:
        child.wait()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        kill_process(child.pid)


@pytest.mark.parametrize("by_object", [False, True])
def test_kill_node_kills_the_whole_tree(by_object: bool, tmp_path: object) -> None:
    raylet = f"{tmp_path}/raylet"
    os.symlink(sys.executable, raylet)
    with process(raylet, "-c", RAYLET, f"--node_id={NODE_ID}") as child:
        tree = [psutil.Process(child.pid)]
        while len(tree) < 3:
            tree = [tree[0], *tree[0].children(recursive=True)]
        killed = kill_node(SimpleNamespace(node_id=NODE_ID) if by_object else NODE_ID)
        assert killed[0] == child.pid
        assert sorted(killed) == sorted(member.pid for member in tree)
        assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in tree)


def test_kill_node_names_a_missing_node() -> None:
    with pytest.raises(ProcessLookupError, match="no raylet of it runs on this machine"):
        kill_node("f" * 56)


def test_a_paused_process_lives_and_goes_on_when_it_is_resumed() -> None:
    with process(sys.executable, "-uc", "while True: print(input())") as child:
        pause_process(child.pid)
        assert wait_for_state(child.pid, psutil.STATUS_STOPPED)
        resume_process(child.pid)
        assert wait_for_state(child.pid, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)


@pytest.mark.parametrize(("function", "what"), [(pause_process, "pause"), (resume_process, "resume")])
def test_a_missing_process_is_named(function, what) -> None:
    with process("true") as child:
        child.wait()
    with pytest.raises(ProcessLookupError, match=f"cannot {what} process {child.pid}"):
        function(child.pid)


def wait_for_state(pid: int, *states: str) -> bool:
    deadline = time.monotonic() + 10
    while psutil.Process(pid).status() not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    return psutil.Process(pid).status() in states


def raylet_tree(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    tree = [psutil.Process(child.pid)]
    # One that is still starting its child cannot be stopped until that runs its own program.
    while len(tree) < 3 or any(member.status() != psutil.STATUS_SLEEPING for member in tree):
        tree = [tree[0], *tree[0].children(recursive=True)]
    return tree


def test_a_node_is_paused_and_resumed_whole(tmp_path: object) -> None:
    raylet = f"{tmp_path}/raylet"
    os.symlink(sys.executable, raylet)
    with process(raylet, "-c", RAYLET, f"--node_id={NODE_ID}") as child:
        tree = raylet_tree(child)
        assert sorted(pause_node(NODE_ID)) == sorted(member.pid for member in tree)
        assert all(wait_for_state(member.pid, psutil.STATUS_STOPPED) for member in tree)
        resume_node(NODE_ID)
        assert all(wait_for_state(member.pid, psutil.STATUS_SLEEPING) for member in tree)


def test_a_killed_raylet_leaves_its_children_alive(tmp_path: object) -> None:
    raylet = f"{tmp_path}/raylet"
    os.symlink(sys.executable, raylet)
    with process(raylet, "-c", RAYLET, f"--node_id={NODE_ID}") as child:
        tree = raylet_tree(child)
        orphans = kill_raylet(NODE_ID)
        assert sorted(orphans) == sorted(member.pid for member in tree[1:])
        assert child.wait(5) == -signal.SIGKILL
        assert all(member.is_running() for member in tree[1:])
