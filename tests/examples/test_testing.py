from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from ray_jax_ckpt.testing import kill_node, kill_process

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
