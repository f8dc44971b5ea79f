"""The Snapshotter where arrays span processes."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("snapshotter_process.py")


@pytest.mark.timeout(120)
def test_two_processes_snapshot_without_the_runtimes_split():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    command = [sys.executable, str(SCRIPT), str(port)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "all well" in output
