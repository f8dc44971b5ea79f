"""Ranks that are not in step, a peer that is slow, and runs side by side."""

from __future__ import annotations

import pytest
from support import eventually

from faults.crew import Crew
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.testing import Fault, kill_process

pytestmark = pytest.mark.timeout(240)


def test_a_rank_may_be_ahead_and_the_last_complete_step_is_kept_for_all(crew):
    crew.begin()
    safe, ahead = crew.steps(), crew.steps()
    crew.protect(safe)
    crew.snapshot(ahead, ranks=[0])
    eventually(lambda: ahead in crew.live.held_steps(1))  # pushed there by the one ahead
    assert crew.latest() == safe
    crew.snapshot(ahead, ranks=[1])
    crew.wait(ahead)
    further = crew.steps()
    crew.snapshot(further, ranks=[0])
    eventually(lambda: further in crew.live.held_steps(1))
    assert crew.begin(fresh=[1]) == ahead
    assert crew.restore() == [(ahead, "memory:local")] * 2
    crew.protect(crew.steps())
    crew.settle()


def test_a_tree_that_changes_on_all_ranks_is_followed(crew):
    crew.begin()
    crew.protect(crew.steps())
    step = crew.steps()
    crew.protect(step, extra=(0, 1))
    assert crew.begin(fresh=[0]) == step
    assert crew.restore(extra=(0, 1)) == [(step, "memory:local")] * 2
    crew.protect(crew.steps())
    crew.settle()


def test_a_slow_peer_delays_copies_and_nothing_else(crew, plan):
    crew.begin()
    safe, slow, later = crew.steps(), crew.steps(), crew.steps()
    crew.protect(safe)
    armed = plan.arm(Fault("receive", "delay", rank=1, step=slow, delay_s=2))
    crew.snapshot(slow)
    armed.wait()
    crew.protect(later)
    assert crew.begin() == later
    assert {step for step, _ in crew.restore()} == {later}
    crew.protect(crew.steps())
    crew.settle()


def test_two_runs_at_once_and_one_after_the_other_have_nothing_to_do_with_each_other(crew, nodes, pool, run):
    other = Crew(run, nodes[:2], pool)
    other.begin()
    crew.begin()
    crew.protect(crew.steps())
    for _ in range(20):
        step = other.steps()  # far from the first one's
    other.protect(step)
    for rank in crew.ranks:
        kill_process(crew.store_pid(rank))
    assert crew.begin() is None
    assert other.begin() == step
    assert other.restore() == [(step, "memory:local")] * 2
    crew.protect(crew.steps())
    other.settle()
    other.close()
    assert fleet.living_stores(run) == {}
    crew.protect(crew.steps())
    again = Crew(run, nodes[:2], pool)
    assert again.begin() is None  # a run that ended well has left nothing
    again.close()
    crew.settle()
