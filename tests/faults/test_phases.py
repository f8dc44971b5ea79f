"""A fault at every phase, to every victim: what was complete comes back to the last bit, and the run goes on as before.

All cases share one run: each has to leave it as good as new for the next.
"""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import RayActorError

from ray_jax_ckpt.testing import Fault, kill_process

pytestmark = pytest.mark.timeout(240)

WORKER = ["capture", "grant", "copy", "commit"]
STORE = ["committed", "push", "send", "receive", "received"]
RESTORE = ["restore", "read", "confirm"]


def start(crew) -> int:
    """An attempt whose newest generation is protected; its step."""
    step = crew.steps()
    crew.begin()
    crew.protect(step)
    return step


def finish(crew, restored: int) -> None:
    """All ranks restore this step, bit by bit; the next snapshot is protected; nothing else is kept."""
    found = crew.restore()
    assert [step for step, _ in found] == [restored] * len(crew.nodes)
    crew.protect(crew.steps())
    crew.settle()


@pytest.mark.parametrize("point", WORKER)
def test_a_worker_killed_during_a_snapshot(crew, plan, point):
    safe = start(crew)
    step = crew.steps()
    armed = plan.arm(Fault(point, "kill", rank=1, step=step))
    crew.snapshot(step)
    assert armed.wait().pid == crew.pids[1]
    assert crew.begin() == safe
    finish(crew, safe)


@pytest.mark.parametrize("point", ["copy", "commit", "committed", "push", "received"])
def test_a_worker_and_its_store_killed_during_a_snapshot(crew, plan, point):
    safe = start(crew)
    step, store = crew.steps(), crew.store_pid(1)
    armed = plan.arm(Fault(point, "stop", rank=1, step=step))
    crew.snapshot(step)
    assert armed.wait().pid in (crew.pids[1], store)
    for pid in (crew.pids[1], store):
        kill_process(pid)
    restored = crew.begin()
    # A peer's part has arrived in the dead store, and its own may have left it before.
    assert restored in ((safe, step) if point == "received" else (safe,))
    finish(crew, restored)


@pytest.mark.parametrize("point", STORE)
def test_a_store_killed_during_a_snapshot_does_not_stop_the_training(crew, plan, point):
    safe = start(crew)
    step, store = crew.steps(), crew.store_pid(1)
    armed = plan.arm(Fault(point, "kill", rank=1, step=step, occurrence=2 if point == "send" else 1))
    crew.snapshot(step)
    assert armed.wait().pid == store
    assert crew.latest() >= safe
    # A snapshot may find no buffer while the new store starts, which can take long on a busy machine.
    later = crew.recover()
    assert crew.begin() == later
    finish(crew, later)


@pytest.mark.parametrize("point", ["committed", "push", "receive"])
def test_a_store_killed_during_a_snapshot_and_a_failure_at_once(crew, plan, point):
    """The worker group is restarted for another reason before anybody has found the store dead."""
    safe = start(crew)
    step = crew.steps()
    armed = plan.arm(Fault(point, "kill", rank=1, step=step))
    crew.snapshot(step)
    armed.wait()
    restored = crew.begin()
    # Its worker may have put the step into a new store by then.
    assert restored in (safe, step)
    finish(crew, restored)


@pytest.mark.parametrize("point", RESTORE)
def test_a_worker_killed_during_a_restore_is_a_second_failure_that_loses_nothing(crew, plan, point):
    safe = start(crew)
    assert crew.begin(fresh=[1]) == safe
    armed = plan.arm(Fault(point, "kill", rank=1, step=safe))
    with pytest.raises(RayActorError):
        ray.get(crew.workers[1].restore.remote(1), timeout=60)
    assert armed.fired()
    assert crew.begin() == safe
    finish(crew, safe)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_store_killed_while_it_is_verified_for_a_restore(crew, plan, victim):
    safe = start(crew)
    armed = plan.arm(Fault("verify", "kill", rank=victim, step=safe))
    assert crew.begin() == safe
    assert armed.fired()
    finish(crew, safe)


def test_a_second_store_killed_while_it_replaces_the_copies_of_the_first(crew, plan):
    """Two failures at once are more than two copies survive: nothing is restored, and nothing hangs or stays."""
    start(crew)
    armed = plan.arm(Fault("push", "kill", rank=0))
    kill_process(crew.store_pid(1))
    crew.begin()
    armed.wait()
    assert crew.begin() is None
    crew.protect(crew.steps())
    crew.settle()


@pytest.mark.parametrize("point", ["report", "free"])
def test_a_coordinator_killed_during_a_snapshot_does_not_stop_the_training(crew, plan, point):
    start(crew)
    pid = crew.live.coordinator()
    step = crew.steps()
    # What becomes free is the step before.
    armed = plan.arm(Fault(point, "kill", step=step if point == "report" else None))
    crew.snapshot(step)
    assert armed.wait().pid == pid
    crew.wait(step)
    later = crew.steps()
    crew.protect(later)
    assert crew.begin() == later
    finish(crew, later)


def test_a_coordinator_killed_while_it_decides_decides_the_same_again(crew, plan):
    safe = start(crew)
    armed = plan.arm(Fault("decide", "kill"))
    assert crew.begin() == safe
    assert armed.fired()
    finish(crew, safe)


@pytest.mark.parametrize("point", ["grant", "copy", "commit", "committed", "push", "receive", "received", "report"])
def test_an_error_during_a_snapshot_costs_at_most_that_snapshot(crew, plan, point):
    start(crew)
    step = crew.steps()
    armed = plan.arm(Fault(point, "raise", step=step))
    crew.snapshot(step)
    armed.wait()
    later = crew.steps()
    crew.protect(later)
    assert crew.begin() == later
    finish(crew, later)


@pytest.mark.parametrize(("action", "occurrence"), [("drop", 1), ("truncate", 2), ("corrupt", 1), ("corrupt", 2)])
def test_a_transfer_that_arrives_incomplete_or_changed_is_made_again(crew, plan, action, occurrence):
    start(crew)
    step = crew.steps()
    armed = plan.arm(Fault("send", action, step=step, occurrence=occurrence))
    crew.protect(step)
    assert armed.fired()
    kill_process(crew.store_pid(1))
    assert crew.begin(fresh=[1]) == step
    finish(crew, step)
