"""A group that shrinks and grows again on real stores: what it restores, and what its stores take meanwhile."""

from __future__ import annotations

import os
import signal

import numpy as np
import ray
from harness import StubGroup, flip_byte, stub_group
from support import eventually

from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.testing import kill_process

TOTAL = 1 << 20  # bytes of the state, whoever shares it
ROUNDING = 16 * 4096  # each buffer is whole pages


def form(group: StubGroup, nodes: list[tuple[str, str]]) -> None:
    """A new attempt on these nodes, in this order, with the same state; it restores what the last one took."""
    before, group.nodes, group.elements = len(group.nodes), nodes, TOTAL // len(nodes)
    located = group.begin().located
    assert located is not None
    for rank in range(len(nodes)):
        array, _ = group.read(located, rank)
        np.testing.assert_array_equal(array, np.repeat(np.arange(before, dtype=np.uint8), TOTAL // before))


def take(group: StubGroup, step: int) -> float:
    """A snapshot in which every shard is filled with its rank; the most that any store took, in units of the state."""
    most = 0.0
    for rank in range(len(group.nodes)):
        group.commit(rank, step, group.reserve(rank, step), fill=rank)
        most = max(most, *sizes(group).values())
    group.wait(group.generation(step))
    most = max(most, *sizes(group).values())
    eventually(lambda: all(group.held(rank) == {step} for rank in range(len(group.nodes))))
    return most


def sizes(group: StubGroup) -> dict[str, float]:
    """What each living store of the run takes, in units of the state."""
    found = {name: store.held_bytes.remote() for name, store in fleet.living_stores(group.run).items()}
    return {name: (ray.get(ref, timeout=30) - ROUNDING) / TOTAL for name, ref in found.items()}


def test_memory_while_a_group_shrinks_and_grows_again(cluster, run):
    a, b, c, d = sorted((node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
    with stub_group(run, [a, b, c, d]) as group:
        group.elements = TOTAL // 4
        group.begin()
        # Two buffers for a quarter of its own and for one of a peer.
        assert max(take(group, step) for step in (10, 20, 30)) <= 2 * 2 / 4

        os.kill(ray.get(group.store(3).pid.remote()), signal.SIGKILL)
        form(group, [b, a])
        # Every node has at most one copy of what is restored. Where no worker runs any more there is nothing else.
        eventually(lambda: len(sizes(group)) == 3 and sorted(sizes(group).values())[0] <= 2 / 4)
        assert max(sizes(group).values()) <= 1
        # On top of it comes the first snapshot, half own and half the peer's.
        assert take(group, 40) <= 1 + 2 / 2
        eventually(lambda: len(sizes(group)) == 2)
        assert max(take(group, step) for step in (50, 60)) <= 2 * 2 / 2

        form(group, [c, a, d, b])
        assert take(group, 70) <= 1 + 2 * 2 / 4
        take(group, 80)
        eventually(lambda: max(sizes(group).values()) <= 2 * 2 / 4)


def test_a_store_that_dies_while_it_is_read_is_replaced_by_the_next_holder(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        located = group.begin().located
        assert located is not None
        kill_process(ray.get(group.store(0).pid.remote()))
        array, from_peers = group.read(located, 0)
        np.testing.assert_array_equal(array, np.full(array.shape, 10))
        assert from_peers


def test_a_copy_that_a_reader_suspects_is_looked_at_and_made_again(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation = group.snapshot(10)
        group.wait(generation)
        flip_byte(group, 0, generation, "s0>1")
        name = fleet.store_name(run, group.members[0])
        ray.get(group.coordinator.suspect.remote(name, generation, group.decision.attempt, "reset"), timeout=60)
        assert group.wait(generation) == (2, 2)
        os.kill(ray.get(group.store(1).pid.remote()), signal.SIGKILL)
        located = group.begin().located
        assert located is not None
        array, _ = group.read(located, 0)
        np.testing.assert_array_equal(array, np.full(array.shape, 10))
