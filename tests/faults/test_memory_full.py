"""A node without memory."""

from __future__ import annotations

import contextlib
import re
import resource

import psutil
import pytest
import ray

from faults.crew import Crew
from ray_jax_ckpt.errors import MemoryLimitError

pytestmark = pytest.mark.timeout(240)


def test_a_node_without_memory_costs_snapshots_not_the_training(nodes, pool, run):
    crew = Crew(run, nodes[:2], pool)
    crew.begin()
    safe, step, kept, later = (crew.steps() for _ in range(4))
    crew.protect(safe)
    worker = crew.workers[1]
    ray.get(worker.said.remote())
    with no_more_segments(psutil.Process(crew.store_pid(1))):
        ray.get(crew.snapshot(step, extra=(0, 1)))  # too large for the buffers that there are
        assert "cannot give" in crew.problem(1)
        said = ray.get(worker.said.remote())
        # A snapshot that the training relies on is another matter.
        with pytest.raises(MemoryLimitError, match=r"cannot give \d+ bytes.*Raise the limit of open files"):
            ray.get(worker.snapshot.remote(kept, extra=True, force=True))
    place = rf"step {step} failed on rank 1 on node {crew.nodes[1][0]}"
    assert len(said) == 1
    assert re.search(rf"{place} .*training goes on.*cannot give \d+ bytes.*Raise the limit of open files", said[0])
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
