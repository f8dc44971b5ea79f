"""One cluster for all tests of this directory: a head that runs no worker, three nodes, and the faults' directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from support import local_cluster, new_run, workers_of

from faults.crew import Crew, Pool
from ray_jax_ckpt.testing import FaultPlan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def shared_plan() -> Iterator[FaultPlan]:
    """In the environment before the cluster starts, so that all its processes have it."""
    with FaultPlan() as found:
        yield found


@pytest.fixture(scope="package")
def cluster(shared_plan: FaultPlan) -> Iterator[Cluster]:
    """Its processes can import what the tests' workers are made of."""
    paths = [str(ROOT), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with local_cluster(3) as cluster:
            yield cluster


@pytest.fixture(scope="package")
def nodes(cluster: Cluster) -> list[tuple[str, str]]:
    """Id and address of the three nodes."""
    return workers_of(cluster)


@pytest.fixture(scope="package")
def pool(nodes: list[tuple[str, str]]) -> Pool:
    """Workers that have started."""
    return Pool([node for node, _ in nodes])


@pytest.fixture
def plan(shared_plan: FaultPlan) -> Iterator[FaultPlan]:
    """Faults of one test."""
    yield shared_plan
    shared_plan.disarm()


@pytest.fixture
def run() -> str:
    """A run that nobody else uses."""
    return new_run()


class Shift:
    """The crew that tests share as long as each leaves it as good as new."""

    crew: Crew | None = None


@pytest.fixture(scope="module")
def shift() -> Iterator[Shift]:
    """Ends the run with the module's last test, and sees that nothing of it is left."""
    found = Shift()
    yield found
    if found.crew is not None:
        found.crew.close() if found.crew.sound else found.crew.abort()


@pytest.fixture
def crew(shift: Shift, nodes: list[tuple[str, str]], pool: Pool) -> Crew:
    """A run of two workers on two nodes, after a start. A test that passes has to leave it without a trace."""
    if shift.crew is not None and not shift.crew.sound:
        shift.crew.abort()
        shift.crew = None
    if shift.crew is None:
        shift.crew = Crew(new_run(), nodes[:2], pool)
    shift.crew.sound = False
    return shift.crew
