"""A cluster of four nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flight_peer import SECRET, Shelf
from ray.cluster_utils import Cluster
from support import local_cluster, new_run, workers_of

from ray_jax_ckpt.memory.transfer import FlightServer


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


@pytest.fixture
def shelf() -> Shelf:
    """What a server of one store's memory has."""
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[FlightServer]:
    """It serves the shelf."""
    server = FlightServer(SECRET, shelf, "127.0.0.1")
    yield server
    server.close()
