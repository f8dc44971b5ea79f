"""Every process of a run is killed at once while it writes, and a driver that was replaced goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from support import eventually, said_by, workers_of

import ray_jax_ckpt as rjc
from persist.conftest import Disk, PersistedRun
from persist.test_failures import check_all, take
from persist.test_unruly_storage import directories
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.system import process_alive, process_start_time

MOMENTS = {"nothing": "held at step-", "half": "held at w/c/", "no manifest": "held at manifest.json", "all": ""}
"""What lies on storage of step 20 when all are killed, and how its disk is kept there."""


def kill_all(pids: list[int]) -> None:
    started = {pid: process_start_time(pid) for pid in pids}
    for pid in pids:
        # The coordinator ends with its driver.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(process_alive(*one) for one in started.items()), 30)


def test_when_all_are_killed_at_once_what_is_listed_is_whole_and_the_rest_can_be_removed(cluster, tmp_path):
    for moment in MOMENTS:
        (tmp_path / moment).mkdir()
    nodes = json.dumps(workers_of(cluster))
    command = [sys.executable, "-m", "persist.doomed", cluster.address, str(tmp_path), json.dumps(MOMENTS), nodes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        try:
            pids: list[int] = said_by(driver)
            kill_all([driver.pid, *pids])
        finally:
            driver.kill()
    for moment in MOMENTS:
        disk = Disk(tmp_path / moment / "control")
        run = PersistedRun([], str(tmp_path / moment / "run"), {}, disk.filesystem)
        whole = [10, 20] if moment == "all" else [10]
        assert [info.step for info in rjc.checkpoints((run.path, run.filesystem))] == whole, moment
        check_all(run)
        left = [name for name in directories(run) if name not in {Path(run.path_of(step)).name for step in whole}]
        assert len(left) == (moment in ("half", "no manifest")), moment
        for dry_run in (True, False):
            found = rjc.remove_unfinished((run.path, run.filesystem), dry_run=dry_run)
            assert [Path(path).name for path in found] == left
        assert len(directories(run)) == len(whole)
        check_all(run)


@pytest.fixture
def second(run_of, cluster, disk):
    """Makes a second driver of a run."""
    made: list[PersistedRun] = []

    def make(first: PersistedRun, **persist) -> PersistedRun:
        made.append(PersistedRun(first.nodes, first.path, persist, first.filesystem))
        made[-1].run = first.run
        made[-1].directory = RunIdentity(first.run, first.path, first.filesystem)
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_a_driver_that_was_replaced_writes_nothing_and_ends_no_upload_of_the_next_one(run_of, second, disk):
    zombie = run_of(filesystem=disk.filesystem, every_n_steps=1000)
    take(zombie, 10)
    active = second(zombie, every_n_steps=1000)
    active.begin(copies=2)
    disk.says("held at w/c/")
    ray.get(active.coordinator.failed.remote(), timeout=30)
    eventually(Path(disk.path).with_name("met").exists, 60)
    # In its own books the same is due.
    ray.get(zombie.coordinator.failed.remote(), timeout=30)
    eventually(lambda: "of another driver of this run" in zombie.warnings(), 30)
    assert set(uploading(active)) == {f"upload {zombie.sessions[0].decision.attempt}.0.10"}
    disk.says("")
    active.await_steps(10)
    check_all(active)


def uploading(run) -> list[str]:
    probes = ray.get([store.probe.remote() for store in fleet.living_stores(run.run).values()])
    return [lease.id.rpartition(" ")[0] for probe in probes for lease in probe.leases if lease.persists]
