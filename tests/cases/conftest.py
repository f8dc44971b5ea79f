"""One cluster and one run for all tests of this directory: states go from here into a real store, and come back.

From the store's memory, or from storage where a module says so with `BOTH_TIERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from group import Group
from ray.cluster_utils import Cluster
from support import local_cluster

from ray_jax_ckpt import worker

# As small as Ray lets it be: snapshots must not need it.
OBJECT_STORE_BYTES = 80 * 2**20

BOTH_TIERS = pytest.mark.parametrize("tier", ["memory", "storage"], indirect=True)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with local_cluster(1, object_store_memory=OBJECT_STORE_BYTES) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def nodes(cluster: Cluster) -> list[tuple[str, str]]:
    """Id and address of the nodes, first the one that this process is connected to and can map the memory of."""
    head = cluster.head_node.node_id
    found = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: node[0] != head)


@pytest.fixture(scope="package")
def shared(nodes: list[tuple[str, str]]) -> Iterator[Group]:
    """One rank and one store for all tests that only bring states there and back."""
    group = Group(nodes[:1])
    try:
        yield group
    finally:
        group.close()


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> str:
    """Where states come back from."""
    return getattr(request, "param", "memory")


@pytest.fixture
def run(shared: Group, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """The shared group, at the start of an attempt."""
    for name in ("current", "current_or_none"):
        monkeypatch.setattr(worker, name, shared.current)
    shared.begin()
    # What an earlier test left is not to be asked for.
    shared.sessions[0].restores += 1
    if tier == "storage":

        def stored(state: Any, **options: Any) -> Any:
            handle = Group.snapshot(shared, state, **{"force": True} | options)
            return handle.to_directory(tmp_path / f"step {shared.step}")

        monkeypatch.setattr(shared, "snapshot", stored)
    return shared


@pytest.fixture
def group_of(nodes: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Makes groups of their own: by the numbers of the nodes that their ranks are on."""
    made: list[Group] = []

    def make(*where: int, run: str | None = None) -> Group:
        made.append(Group([nodes[number] for number in where], run))
        monkeypatch.setattr(worker, "current", made[-1].current)
        return made[-1]

    yield make
    for group in made:
        group.close()
