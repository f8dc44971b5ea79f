"""A node without memory."""

from __future__ import annotations

import contextlib
import resource

import psutil
import pytest
import ray
from crew import Crew

pytestmark = pytest.mark.timeout(240)


def test_a_node_without_memory_costs_snapshots_not_the_training(nodes, pool, run):
    crew = Crew(run, nodes[:2], pool)
    crew.begin()
    safe, step, later = crew.steps(), crew.steps(), crew.steps()
    crew.protect(safe)
    store = psutil.Process(crew.store_pid(1))
    with no_more_segments(store):
        ray.get(crew.snapshot(step, extra=(0, 1)))  # too large for the buffers that there are
        problem = crew.problem(1)
    assert "cannot give" in problem, problem
    assert crew.latest() == safe
    crew.protect(later, extra=(0, 1))
    assert crew.begin(fresh=[0]) == later
    assert {step for step, _ in crew.restore(extra=(0, 1))} == {later}
    crew.protect(crew.steps())
    crew.settle()
    crew.close()


@contextlib.contextmanager
def no_more_segments(process: psutil.Process):
    """The system refuses the process every new piece of memory that it could share."""
    before = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, before)
