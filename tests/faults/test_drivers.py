"""Controllers that die, and second drivers of a run that is being trained."""

from __future__ import annotations

import os
import signal

import pytest
import ray
from support import eventually

from faults.crew import CONFIG, Crew
from ray_jax_ckpt.errors import RunInUseError
from ray_jax_ckpt.memory.claim import DriverIdentity, claim
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator

pytestmark = pytest.mark.timeout(240)


class Controller:
    """An actor that starts a run's coordinator, as Ray Train's controller does."""

    def pid(self) -> int:
        return os.getpid()

    def claim(self, run: str, patience_s: float = 40.0):
        context = ray.get_runtime_context()
        driver = DriverIdentity("far-away", 4711, context.get_job_id(), 1.75e9)
        identity = RunIdentity(run, f"/nowhere/{run}", None)
        return claim(
            run,
            lambda: start_coordinator(identity, CONFIG, context.get_node_id(), driver=driver),
            called=f"Run {run}",
            patience_s=patience_s,
        )


def new_controller():
    return ray.remote(Controller).options(num_cpus=0).remote()  # pyright: ignore[reportAttributeAccessIssue]


class Controlled(Crew):
    """A crew whose coordinator belongs to a controller."""

    def start_coordinator(self) -> None:
        self.controller = new_controller()
        self.coordinator = ray.get(self.controller.claim.remote(self.run), timeout=60)


def test_a_name_that_becomes_free_in_the_last_moment_is_taken(nodes, run):
    tries = []

    def start():
        tries.append(run)
        if len(tries) < 2:
            raise ValueError("the name is taken")
        return "started"

    assert claim(run, start, called="The run", patience_s=0.0) == "started"


def test_a_second_driver_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(nodes, pool, run):
    crew = Controlled(run, nodes[:2], pool)
    crew.begin()
    crew.protect(10)
    first, second = crew.controller, new_controller()
    said = (
        r"is being trained already, by process 4711 on far-away \(Ray job \w+\), since 2025-06-15 15:06:40 UTC.*name="
    )
    with pytest.raises(RunInUseError, match=said):
        ray.get(second.claim.remote(run), timeout=60)
    # That has changed nothing.
    crew.protect(20)
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    # At once: it may seem to live for a moment.
    crew.start_coordinator()
    assert crew.begin() == 20
    assert crew.restore() == [(20, "memory:local")] * 2
    crew.skip_to(20)
    crew.protect(crew.steps())
    # One that does not answer, and does not die either.
    pid = crew.live.coordinator()
    os.kill(pid, signal.SIGSTOP)
    crew.coordinator = ray.get(second.claim.remote(run, patience_s=1.0), timeout=60)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert crew.begin() == 30
    crew.close()
    for controller in (crew.controller, second):
        ray.kill(controller)
