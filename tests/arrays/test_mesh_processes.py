"""A generation of real processes is restored by more of them, and by a single one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_process import restore

SCRIPT = Path(__file__).with_name("mesh_process.py")


def run(role: str, directory: Path, processes: int, devices: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parent)]),
    }
    commands = [
        [sys.executable, str(SCRIPT), role, str(directory), str(port), str(rank), str(processes)]
        for rank in range(processes)
    ]
    group = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in group]
    finally:
        for process in group:
            process.kill()
            process.wait()
    for process, output in zip(group, outputs, strict=True):
        assert process.returncode == 0, output
        assert "all well" in output


@pytest.mark.timeout(240)
def test_what_two_processes_took_three_and_one_restore(tmp_path, monkeypatch):
    run("save", tmp_path, 2, 2)
    run("restore", tmp_path, 3, 1)
    import jax

    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    restore(tmp_path, 0, 1)
