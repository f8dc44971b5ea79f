"""Processes that stand still for longer than anybody waits, and then go on."""

from __future__ import annotations

import time

import pytest
import ray
from support import eventually

from faults.crew import CONFIG, Crew
from ray_jax_ckpt.model.slots import Phase
from ray_jax_ckpt.testing import Fault, pause_process, resume_process

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("end", ["resume", "kill"])
def test_a_worker_stopped_in_mid_copy_writes_into_nothing_of_later_attempts(crew, plan, end):
    safe, step = crew.steps(), crew.steps()
    crew.begin()
    crew.protect(safe)
    armed = plan.arm(Fault("copy", "stop", rank=1, step=step))
    crew.snapshot(step)
    fired, zombie = armed.wait(), crew.workers[1]
    assert fired.pid == crew.pids[1]
    assert crew.begin(fresh=[1]) == safe
    # Of two buffers one holds what is safe, and the other one is still being written to.
    ray.get(crew.snapshot(crew.steps()))
    assert crew.problem(1)
    assert [slot.phase for slot in crew.slots(1) if slot.generation.step == step] == [Phase.STRANDED]
    assert crew.latest() == safe
    getattr(fired, end)()
    last = crew.recover()
    assert not [slot for slot in crew.slots(1) if slot.phase is Phase.STRANDED]
    assert crew.begin() == last
    assert {step for step, _ in crew.restore()} == {last}
    crew.protect(crew.steps())
    crew.settle()
    del zombie


def test_a_receiving_store_stopped_past_the_timeout_costs_nothing_that_was_safe(nodes, pool, plan, run):
    crew = Crew(run, nodes[:2], pool, CONFIG.model_copy(update={"timeout_s": 3}))
    crew.begin()
    safe, step = crew.steps(), crew.steps()
    crew.protect(safe)
    armed = plan.arm(Fault("receive", "stop", rank=1, step=step))
    crew.snapshot(step)
    fired = armed.wait()
    time.sleep(4)  # longer than a push to it is waited for
    # Its own copies are there or not; nothing that was complete is lost.
    assert crew.latest() >= safe
    fired.resume()
    later = crew.recover()
    assert crew.begin() == later
    assert {step for step, _ in crew.restore()} == {later}
    crew.protect(crew.steps())
    crew.settle()
    crew.close()


def test_a_coordinator_stopped_for_a_while_stops_no_snapshot(crew):
    crew.begin()
    safe = crew.steps()
    crew.protect(safe)
    pid = crew.live.coordinator()
    pause_process(pid)
    steps = [crew.steps() for _ in range(2)]
    try:
        assert ray.get(crew.snapshot(steps[0])) == [True, True]
        crew.snapshot(steps[1])
        # Nobody tells the stores what is free: the second one has to wait.
        eventually(lambda: {safe, steps[0]} <= crew.live.held_steps(0))
    finally:
        resume_process(pid)
    crew.wait(steps[-1])
    assert crew.begin() == steps[-1]
    assert {step for step, _ in crew.restore()} == {steps[-1]}
    crew.protect(crew.steps())
    crew.settle()
