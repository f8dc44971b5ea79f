"""Drivers that die, and what goes on without them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import eventually, said_by

from faults.crew import Crew
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.arena import process_alive, process_start_time

pytestmark = pytest.mark.timeout(240)


def test_stores_survive_a_killed_driver_for_the_next_one_and_end_when_there_is_none(cluster, nodes, pool, run):
    script = Path(__file__).with_name("driver.py")
    command = [sys.executable, str(script), cluster.address, json.dumps(nodes[:2]), run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        said = said_by(driver)
        started = {pid: process_start_time(pid) for pid in said["pids"]}
        driver.send_signal(signal.SIGKILL)
    # Its second run was to be given up at once.
    eventually(lambda: not fleet.living_stores(f"{run}b"))
    crew = Crew(run, nodes[:2], pool)
    assert crew.begin() == said["step"]
    assert crew.restore() == [(said["step"], "memory:local")] * 2
    crew.skip_to(said["step"])
    crew.protect(crew.steps())
    crew.settle()
    crew.close()
    eventually(lambda: not any(process_alive(pid, start) for pid, start in started.items() if start is not None))
