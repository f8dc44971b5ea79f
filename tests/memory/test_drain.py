"""Stores and nodes that die or drain in mid-attempt: copies are made elsewhere, and one more snapshot is announced."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import ray
from harness import CONFIG, ELEMENTS, StubGroup, stub_group
from support import eventually

from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.errors import SnapshotError
from ray_jax_ckpt.memory.announce import Listener
from ray_jax_ckpt.memory.arena import open_segment
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.testing import drain_node, kill_node


@pytest.fixture(scope="module")
def nodes(cluster) -> list[tuple[str, str]]:
    """Those that live from the first test to the last; a test that drains one adds it."""
    head = cluster.head_node.node_id
    found: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]
    return sorted((node["NodeID"], node["NodeManagerAddress"]) for node in found)


def places(group: StubGroup, rank: int, step: int) -> set[str]:
    """Parts of a step that a rank's store holds."""
    view, _ = ray.get(group.store(rank).view.remote(group.generation(step)), timeout=30)
    return set(view.places)


def kill_store(group: StubGroup, rank: int) -> None:
    os.kill(ray.get(group.store(rank).pid.remote()), signal.SIGKILL)


def everything(group: StubGroup) -> set[str]:
    return {part.id for rank in range(len(group.nodes)) for part in group.layout(rank).parts}


def test_copies_lost_with_a_store_are_made_again_without_a_new_snapshot_or_group(nodes, run):
    with stub_group(run, nodes) as group:
        group.begin()
        group.wait(group.snapshot(10))
        kill_store(group, 1)
        eventually(lambda: places(group, 0, 10) == places(group, 2, 10) == everything(group))
        # What the dead store was to get of a snapshot that becomes complete later goes elsewhere too.
        parts = everything(group)
        group.snapshot(20, ranks=[2])
        name = next(part.id for part in group.layout(0).parts)
        assert name in parts
        group.decision.stores[1] = ray.get(group.coordinator.replace_store.remote(1, 1), timeout=60)
        assert group.wait(group.snapshot(20, ranks=[0, 1])) == (2, 2)


def test_a_snapshot_that_becomes_complete_after_a_store_died_gets_its_copies_elsewhere(nodes, run):
    with stub_group(run, nodes) as group:
        group.begin()
        group.snapshot(10, ranks=[1, 2])
        eventually(lambda: {"h1", "s1>2"} <= places(group, 2, 10))
        kill_store(group, 1)
        time.sleep(3)  # the death is known, and nothing could be done about it yet
        group.snapshot(10, ranks=[0])
        eventually(lambda: places(group, 0, 10) == places(group, 2, 10) == everything(group))


@dataclasses.dataclass
class Ranks:
    """Training threads that ask at every step whether an announced snapshot is due."""

    group: StubGroup
    step: int = 0
    missed: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.group.decision is not None
        arguments = (self.group.coordinator, self.group.decision.attempt)
        self.listeners = [
            Listener(*arguments, rank, self.group.decision.leaving, self.missed.append)
            for rank in range(len(self.group.nodes))
        ]

    def go_on(self) -> int | None:
        """All do one step. The step, if it is the announced one."""
        self.step += 1
        due = [listener.arrive((0, self.step)) for listener in self.listeners]
        assert len(set(due)) == 1
        time.sleep(0.02)
        return self.step if due[0] else None


def test_a_drained_node_keeps_nothing_to_itself_and_gets_nothing_new(cluster, nodes, run):
    with stub_group(run, [*nodes[:2], new_node(cluster)]) as group:
        group.begin()
        group.wait(group.snapshot(1))
        ranks = Ranks(group, step=1)
        for _ in range(5):
            assert ranks.go_on() is None
        drain_node(group.nodes[2][0], deadline_s=30)
        # Its copies are elsewhere before anybody has taken another snapshot.
        eventually(lambda: places(group, 0, 1) == places(group, 1, 1) == everything(group))
        step = eventually(ranks.go_on)
        assert {listener.leaving for listener in ranks.listeners} == {frozenset({2})}
        group.leaving = frozenset({2})
        assert group.wait(group.snapshot(step)) == (2, 2)
        assert places(group, 0, step) == places(group, 1, step) == everything(group)
        assert places(group, 2, step) == {part.id for part in group.layout(2).parts}
        assert not any(ranks.go_on() for _ in range(20))
        kill_node(group.nodes[2][0])
        group.nodes, group.leaving = group.nodes[:2], frozenset()
        located = group.begin().located
        assert located is not None
        assert located.generation.step == step
        np.testing.assert_array_equal(group.read(located, 0)[0], np.full(3 * ELEMENTS, step % 251, np.uint8))
        assert ranks.missed == []


def test_a_group_that_starts_beside_a_draining_node_is_placed_around_it(cluster, nodes, run):
    node = new_node(cluster)
    with stub_group(run, [nodes[0], node, nodes[1]]) as group:
        group.begin()
        group.wait(group.snapshot(1))
        drain_node(node[0], deadline_s=60)
        eventually(Ranks(group, step=1).go_on)
        assert group.begin().leaving == {1}
        with pytest.raises(ValueError, match="no node of that id"):
            drain_node("0" * 56, deadline_s=1)


def new_node(cluster) -> tuple[str, str]:
    node = cluster.add_node(num_cpus=0)
    return node.node_id, node.node_ip_address


class Replicas(StubGroup):
    """Ranks 0 and 2 hold the same shard, and nobody has anything to itself unless it has `data`."""

    def layout(self, rank: int) -> Layout:
        shard = (0, ((0, ELEMENTS),), ELEMENTS)
        host = (f"h{rank}", ((rank + 1) % 3,), True, [])
        parts = [("s0.2>", (), False, [shard]), host] if rank != 1 else [host]
        leaf = {"path": "w", "kind": "array", "shape": [ELEMENTS]}
        return Layout(rank, 3, "structure", (leaf,), frozenset(), lay_out(parts))

    def take(self, rank: int, step: int, data: Any) -> None:
        layout, grant = self.layout(rank), self.reserve(rank, step)
        digests: dict[str, list[str]] = {part.id: [] for part in layout.parts}
        content = np.full(ELEMENTS, step % 251, np.uint8)
        with open_segment(grant.segment, writable=True) as mapping:
            for part in layout.parts[: len(layout.parts) - 1]:
                digests[part.id].append(copy_and_digest(mapping.view()[part.offset :][:ELEMENTS], content, True))
        raw = Index(self.generation(step), layout, digests, {}, data).to_bytes()
        attempt = self.generation(step).attempt
        ray.get(self.store(rank).commit.remote(attempt, grant.slot, raw), timeout=60)


def test_survivors_that_hold_everything_complete_a_snapshot_without_the_rank_that_is_gone(nodes, run):
    group = Replicas(run, nodes, CONFIG).start_coordinator()
    try:
        group.begin()
        for rank in range(3):
            group.take(rank, 10, None)
        group.wait(group.generation(10))
        for rank in (0, 2):
            group.take(rank, 20, None)
        assert group.latest() == 10
        ray.get(group.coordinator.gone.remote((1,)), timeout=30)
        eventually(lambda: group.latest() == 20)
        # With `data` something is lost that only the rank knew: who waits is told, and the older one stays.
        for rank in (0, 2):
            group.take(rank, 30, {"position": rank})
        with pytest.raises(ray.exceptions.RayTaskError, match=r"abandoned: ranks \[1\] are gone") as caught:
            group.wait(group.generation(30))
        assert isinstance(caught.value, SnapshotError)
        located = group.begin().located
        assert located is not None
        assert located.generation.step == 20
        indices = [Index.from_bytes(raw) for raw in located.indices]
        assert [index.layout.rank for index in indices] == [0, 1, 2]
        # Any single store may die now: the stand-in has copies like any part.
        eventually(lambda: group.wait(located.generation) == (2, 2))
    finally:
        group.close()
