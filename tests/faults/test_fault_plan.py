"""Faults at points: who fires which, how often, and what that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.testing import Fault, FaultPlan, InjectedError

CHILD = """
from ray_jax_ckpt.observe import faults
faults.identify({rank})
for step in {steps}:
    faults.reach("copy", step)
    print(step, flush=True)
"""


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch):
    """The cluster of this directory's tests lives in a plan."""
    monkeypatch.setattr(faults, "_rank", None)
    monkeypatch.setattr(faults, "_directory", None)
    monkeypatch.delenv(faults.VARIABLE, raising=False)


@pytest.fixture
def plan(a_process_of_its_own):
    with FaultPlan() as found:
        yield found


def child(rank, *steps):
    """A process that inherits the plan, as what Ray starts does."""
    code = CHILD.format(rank=rank, steps=steps)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_point_is_passed_where_nothing_is_armed(plan):
    faults.reach("copy", 1)
    assert faults.tamper("send", "1.0.7", np.arange(4, dtype=np.uint8)).tolist() == [0, 1, 2, 3]


def test_a_fault_fires_once(plan):
    armed = plan.arm(Fault("copy", "raise"))
    assert armed.fired() is None
    with pytest.raises(InjectedError, match="injected at point 'copy'"):
        faults.reach("copy", 7)
    faults.reach("copy", 7)
    fired = armed.wait(1)
    assert (fired.pid, fired.rank, fired.step) == (os.getpid(), None, 7)
    assert abs(fired.time - time.time()) < 60


def test_point_rank_step_and_occurrence_select(plan):
    faults.identify(1)
    armed = plan.arm(Fault("copy", "raise", rank=1, step=20, occurrence=2))
    faults.reach("commit", 20)
    faults.reach("copy", 10)
    faults.identify(0)
    faults.reach("copy", 20)
    faults.identify(1)
    faults.reach("copy", 20)
    assert armed.fired() is None
    with pytest.raises(InjectedError):
        faults.reach("copy", 20)


def test_what_is_disarmed_does_not_fire_and_time_runs_out(plan):
    one, two = plan.arm(Fault("copy", "raise")), plan.arm(Fault("copy", "raise"))
    one.disarm()
    plan.disarm()
    faults.reach("copy", 1)
    with pytest.raises(TimeoutError, match=r"did not fire within 0\.05 s"):
        two.wait(0.05)


def test_outside_of_its_block_a_plan_does_nothing():
    with FaultPlan() as plan:
        plan.arm(Fault("copy", "raise"))
    faults.reach("copy", 1)
    assert faults.VARIABLE not in os.environ


def test_after_an_inner_plan_the_outer_one_counts_again(plan):
    with FaultPlan() as inner:
        assert os.environ[faults.VARIABLE] == inner.env_vars[faults.VARIABLE]
    assert os.environ[faults.VARIABLE] == plan.env_vars[faults.VARIABLE]
    plan.arm(Fault("copy", "raise"))
    with pytest.raises(InjectedError):
        faults.reach("copy", 1)


def test_bytes_on_their_way_are_dropped_cut_or_changed(plan):
    chunk = np.arange(9, dtype=np.uint8)
    for action, expected in [("drop", []), ("truncate", [0, 1, 2, 3]), ("corrupt", [0, 1, 2, 19, 4, 5, 6, 7, 8])]:
        plan.arm(Fault("send", action, step=7))
        assert faults.tamper("send", "1.0.7", chunk).tolist() == expected
    assert chunk.tolist() == list(range(9))


def test_a_delay_is_waited_for(plan):
    armed = plan.arm(Fault("copy", "delay", delay_s=0.05))
    faults.reach("copy", 1)
    assert time.time() - armed.wait(0).time >= 0.05


def test_another_process_is_killed_at_its_point_and_no_second_one(plan):
    armed = plan.arm(Fault("copy", "kill", rank=1, step=2))
    with child(1, 1, 2, 3) as victim:
        assert victim.stdout.read() == "1\n"
    assert victim.returncode == -signal.SIGKILL
    assert armed.fired().pid == victim.pid
    with child(1, 1, 2, 3) as restarted:
        assert restarted.stdout.read() == "1\n2\n3\n"


def test_a_stopped_process_goes_on_when_told(plan):
    armed = plan.arm(Fault("copy", "stop"))
    with child(0, 1) as victim:
        armed.wait(30).resume()
        assert victim.stdout.read() == "1\n"
    assert victim.returncode == 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (("nowhere", "kill"), "no point 'nowhere'; take one of \\['capture'"),
        (("copy", "burn"), "no action 'burn'"),
        (("copy", "truncate"), "needs bytes on their way"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault, why):
    with pytest.raises(ConfigError, match=why):
        Fault(*fault)
