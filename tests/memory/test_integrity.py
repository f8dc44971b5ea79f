"""Bad copies on real stores: found, never restored, and repaired within the memory that is there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
import ray
import trustme
from harness import CONFIG, ELEMENTS, StubGroup, flip_byte, stub_group
from support import eventually

from ray_jax_ckpt.config import TlsConfig
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.errors import SnapshotError
from ray_jax_ckpt.memory.arena import open_segment
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.model.index import Index, Layout, lay_out

PARTS = {"s0>1", "s1>0", "h0", "h1"}


def good_parts(group: StubGroup, rank: int, generation) -> frozenset[str]:
    """What a store finds intact now."""
    report = ray.get(group.store(rank).verify.remote(generation), timeout=30)
    return report.parts if not report.damaged else frozenset()


def held_bytes(group: StubGroup) -> list[int]:
    return [ray.get(group.store(rank).held_bytes.remote(), timeout=30) for rank in (0, 1)]


def locate(group: StubGroup, generation):
    located = ray.get(group.coordinator.locate.remote(generation, 0, group.decision.attempt), timeout=30)
    group.coordinator.let_go.remote(0, group.decision.attempt)
    return located


def test_damaged_copies_are_repaired_from_the_good_ones_in_the_same_memory(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation = group.snapshot(10)
        group.wait(generation)
        before = held_bytes(group)
        # Of the worker's own, and of what a peer has pushed.
        flip_byte(group, 0, generation, "s0>1")
        flip_byte(group, 0, generation, "s1>0")
        assert store_name(group, 1) in locate(group, generation).holders["s0>1"]
        eventually(lambda: good_parts(group, 0, generation) == PARTS)
        assert group.wait(generation) == (2, 2)
        assert held_bytes(group) == before
        np.testing.assert_array_equal(group.read(locate(group, generation), 0)[0], 10)
        # Nothing is stuck by it.
        for step in (20, 30, 40):
            group.wait(group.snapshot(step))
        eventually(lambda: group.held(0) == group.held(1) == {40})
        assert max(held_bytes(group)) <= 4 * (group.layout(0).num_bytes + 4096)
        # An attempt that finds damage when it looks for what to restore has it repaired too.
        flip_byte(group, 1, group.generation(40), "s0>1")
        located = group.begin().located
        assert located is not None
        eventually(lambda: good_parts(group, 1, located.generation) == PARTS)
        assert group.wait(located.generation) == (2, 2)


def test_what_goes_bad_while_nobody_looks_is_found_and_repaired(nodes, run):
    with stub_group(run, nodes[:2], CONFIG.model_copy(update={"scrub_interval_s": 0.3})) as group:
        group.begin()
        generation = group.snapshot(10)
        group.wait(generation)
        flip_byte(group, 1, generation, "s0>1")
        place = ray.get(group.store(1).view.remote(generation))[0].places["s0>1"]
        with open_segment(place.segment) as mapping:
            eventually(lambda: (mapping.view()[place.offset :][:ELEMENTS] == 10).all())
        eventually(lambda: group.wait(generation) == (2, 2))


def store_name(group: StubGroup, rank: int) -> str:
    return ray.get(group.store(rank).inventory.remote(), timeout=30).name


def test_what_was_taken_without_digests_is_not_restored_by_a_run_that_wants_them(nodes, run):
    with stub_group(run, nodes[:2], CONFIG.model_copy(update={"verify": False})) as group:
        group.begin()
        group.wait(group.snapshot(10))
        assert group.begin().located is not None
        ray.kill(group.coordinator)
        group.config = CONFIG
        assert group.start_coordinator().begin().located is None


@dataclass
class ReplicaGroup(StubGroup):
    """Both ranks hold the same shard, as data parallelism has it; what rank 1 captured may differ."""

    def layout(self, rank: int) -> Layout:
        shard = (0, ((0, ELEMENTS),), ELEMENTS)
        parts = [("s0.1>", (), rank == 0, [shard]), (f"h{rank}", (1 - rank,), True, [])]
        return Layout(rank, 2, "structure", ({"path": "['w']"},), frozenset(), lay_out(parts))

    def commit_filled(self, rank: int, step: int, fill: int) -> None:
        grant, layout = self.reserve(rank, step), self.layout(rank)
        with open_segment(grant.segment, writable=True) as mapping:
            text = copy_and_digest(mapping.view()[:ELEMENTS], np.full(ELEMENTS, fill, np.uint8), True)
        index = Index(self.generation(step), layout, {"s0.1>": [text], f"h{rank}": []})
        attempt = self.generation(step).attempt
        ray.get(self.store(rank).commit.remote(attempt, grant.slot, index.to_bytes()), timeout=60)


@pytest.fixture
def replicas(nodes, run, tmp_path):
    group = ReplicaGroup(run, nodes[:2])

    def start(**settings) -> ReplicaGroup:
        group.config = CONFIG.model_copy(update=settings)
        identity = RunIdentity(run, str(tmp_path), pyarrow.fs.LocalFileSystem())
        group.coordinator = start_coordinator(identity, group.config, ray.get_runtime_context().get_node_id())
        group.begin()
        return group

    yield start
    group.close()


def events(directory, name: str) -> list[dict]:
    lines = (directory / "ray_jax_ckpt" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_of_replicas_that_differ_the_lowest_ranks_is_restored_everywhere(replicas, tmp_path):
    group = replicas()
    for step, order in ((10, (0, 1)), (20, (1, 0))):
        for rank in order:
            group.commit_filled(rank, step, fill=step + rank)
        generation = group.generation(step)
        assert group.wait(generation) == (2, 2)
        located = locate(group, generation)
        assert len(located.holders["s0.1>"]) == 2
        for rank in (0, 1):
            place = ray.get(group.store(rank).view.remote(generation))[0].places["s0.1>"]
            with open_segment(place.segment) as mapping:
                np.testing.assert_array_equal(mapping.view()[place.offset :][:ELEMENTS], step)
    first, second = eventually(lambda: found if len(found := events(tmp_path, "replicas_differ")) == 2 else None)
    assert (first["step"], first["leaves"], first["ranks"]) == (10, ["['w']"], [0, 1])
    assert second["step"] == 20


def test_replicas_that_differ_may_be_rejected_and_the_older_step_stays(replicas, tmp_path):
    group = replicas(on_replica_mismatch="reject")
    for rank in (0, 1):
        group.commit_filled(rank, 10, fill=10)
    group.wait(group.generation(10))
    for rank in (0, 1):
        group.commit_filled(rank, 20, fill=20 + rank)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"step 20 was abandoned: replicas of .* differ") as caught:
        group.wait(group.generation(20))
    assert isinstance(caught.value, SnapshotError)
    assert group.latest() == 10
    eventually(lambda: group.held(0) == group.held(1) == {10})
    located = group.begin().located
    assert located is not None
    assert located.generation.step == 10


def test_stores_copy_to_each_other_with_certificates_and_end_when_a_run_wants_none(nodes, run, tmp_path):
    authority, paths = trustme.CA(), [str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    issued = authority.issue_cert(*{address for _, address in nodes[:2]})
    Path(paths[0]).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    tls = TlsConfig(**dict(zip(("certificate", "private_key", "ca"), paths, strict=True)))
    with stub_group(run, nodes[:2], CONFIG.model_copy(update={"tls": tls})) as group:
        group.begin()
        assert group.wait(group.snapshot(10)) == (2, 2)
        assert ray.get(group.store(0).inventory.remote()).address.startswith("grpc+tls://")
        ray.kill(group.coordinator)
        group.config = CONFIG
        assert group.start_coordinator().begin().located is None
        assert group.wait(group.snapshot(20)) == (2, 2)
