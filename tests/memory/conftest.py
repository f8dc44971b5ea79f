"""A cluster of four nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from support import local_cluster, new_run, workers_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Shared by a module's tests, which leave its nodes alive."""
    with local_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: Cluster) -> list[tuple[str, str]]:
    """Id and address of the worker nodes."""
    return workers_of(cluster)


@pytest.fixture
def run() -> str:
    """A run that nobody else uses."""
    return new_run()
