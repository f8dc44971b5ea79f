"""Raylets and whole nodes that die or stand still, and what goes on without them."""

from __future__ import annotations

import contextlib

import psutil
import pytest
import ray
from support import eventually

from faults.crew import Crew
from ray_jax_ckpt.system import process_alive, process_start_time
from ray_jax_ckpt.testing import Fault, kill_node, kill_raylet, pause_node, resume_node

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def doomed(cluster):
    """A node that the test may break. Whatever is left of it is killed."""
    node = cluster.add_node(num_cpus=0)
    yield node.node_id
    with contextlib.suppress(ProcessLookupError):
        kill_node(node.node_id)
    cluster.remove_node(node, allow_graceful=False)


def move_in(run, nodes, pool, doomed) -> Crew:
    """A crew whose rank 1 is on the doomed node."""
    crew = Crew(run, [nodes[0], (doomed, nodes[0][1])], pool)
    crew.begin()
    crew.protect(crew.steps())
    return crew


def move_out(crew, node, restored) -> None:
    """Rank 1 goes on elsewhere."""
    crew.nodes[1] = node
    assert crew.begin(fresh=[1]) == restored
    found = crew.restore()
    assert found == [(restored, "memory:local"), (restored, "memory:peer")]
    crew.protect(crew.steps())


def test_a_node_killed_whole_during_a_snapshot(nodes, pool, plan, run, doomed):
    crew = move_in(run, nodes, pool, doomed)
    step = crew.steps()
    armed = plan.arm(Fault("push", "stop", rank=1, step=step))
    crew.snapshot(step)
    armed.wait()
    kill_node(doomed)
    # Nor would Ray Train start workers again before.
    eventually(lambda: doomed not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}, 60)
    move_out(crew, nodes[1], step - 10)
    crew.settle()
    crew.close()


def test_a_raylet_killed_alone_leaves_no_store_and_no_writer_that_counts(nodes, pool, run, doomed):
    crew = move_in(run, nodes, pool, doomed)
    store, zombie = crew.store_pid(1), crew.workers[1]
    zombie.snapshot_for_ever.remote(1000)
    started = process_start_time(store)
    orphans = [psutil.Process(pid) for pid in kill_raylet(doomed) if psutil.pid_exists(pid)]
    try:
        eventually(lambda: not process_alive(store, started))
        move_out(crew, nodes[1], 10)
        crew.settle()
        assert {slot.generation.attempt for rank in crew.ranks for slot in crew.slots(rank)} == {crew.attempt}
        crew.close()
    finally:
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
    del zombie


def test_a_node_that_stands_still_is_done_without_and_gives_up_what_it_held(nodes, pool, run, doomed):
    crew = move_in(run, nodes, pool, doomed)
    crew.workers[1].snapshot_for_ever.remote(1000)
    pause_node(doomed)
    try:
        move_out(crew, nodes[1], 10)
    finally:
        resume_node(doomed)
    crew.protect(crew.steps())
    crew.settle()
    crew.close()
