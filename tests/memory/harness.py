"""Stub workers for tests of real stores and a real coordinator on a real cluster: no jax, no Ray Train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.arena import open_segment
from ray_jax_ckpt.memory.messages import Decision, Grant, Located, Member, RunIdentity
from ray_jax_ckpt.memory.reader import Reader
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.memory.store import writer_identity
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.placement import partners
from ray_jax_ckpt.model.recovery import Catalog, Want
from ray_jax_ckpt.model.shards import Generation

CONFIG = SnapshotConfig(timeout_s=10, orphan_timeout_s=60)
ELEMENTS = 200_003  # of each rank's shard, odd on purpose: nothing is aligned by luck


@dataclass
class StubGroup:
    """One attempt of a group of stub workers, one per node given. All of them live in the calling process."""

    run: str
    nodes: list[tuple[str, str]]
    config: SnapshotConfig = CONFIG
    coordinator: Any = None
    leaving: frozenset[int] = frozenset()
    decision: Decision | None = field(default=None)
    elements: int = ELEMENTS

    def start_coordinator(self) -> StubGroup:
        """A new coordinator for the same run, such as a new driver starts."""
        here = ray.get_runtime_context().get_node_id()
        self.coordinator = start_coordinator(RunIdentity(self.run, f"/nowhere/{self.run}", None), self.config, here)
        return self

    @property
    def members(self) -> tuple[Member, ...]:
        """One rank per node."""
        return tuple(Member(rank, node, ip, 0, node) for rank, (node, ip) in enumerate(self.nodes))

    def begin(self) -> Decision:
        """A new attempt."""
        self.decision = ray.get(self.coordinator.begin_attempt.remote(self.members), timeout=60)
        return self.decision

    def store(self, rank: int) -> Any:
        """A rank's store."""
        assert self.decision is not None
        return self.decision.stores[rank]

    def generation(self, step: int) -> Generation:
        """Of the current attempt."""
        assert self.decision is not None
        return Generation(self.decision.attempt, 0, step)

    def layout(self, rank: int) -> Layout:
        """Each rank has one shard of leaf 0 to itself, and its host part."""
        targets = partners(rank, [node for node, _ in self.nodes], self.config.copies, self.leaving)
        shard = (0, ((rank * self.elements, (rank + 1) * self.elements),), self.elements)
        parts = [(f"s{rank}>{'.'.join(map(str, targets))}", targets, True, [shard]), (f"h{rank}", targets, True, [])]
        return Layout(rank, len(self.nodes), "structure", ({"path": "w"},), frozenset(), lay_out(parts))

    def reserve(self, rank: int, step: int, timeout_s: float = 10.0) -> Grant:
        """Gets a buffer."""
        args = (self.generation(step), self.layout(rank).num_bytes, writer_identity(), timeout_s)
        return ray.get(self.store(rank).begin.remote(self.generation(step).attempt, *args), timeout=60)

    def commit(self, rank: int, step: int, grant: Grant, fill: int | None = None) -> None:
        """Fills and commits it: all elements are the step (or `fill`) modulo 251."""
        layout = self.layout(rank)
        content = np.full(self.elements, (step if fill is None else fill) % 251, np.uint8)
        with open_segment(grant.segment, writable=True) as mapping:
            digests = {part.id: [] for part in layout.parts}
            part = layout.parts[0]
            place = mapping.view()[part.offset :][: self.elements]
            digests[part.id].append(copy_and_digest(place, content, self.config.verify))
        index = Index(self.generation(step), layout, digests, {}, {"rank": rank}, {"loss": float(step)})
        ray.get(self.store(rank).commit.remote(self.generation(step).attempt, grant.slot, index.to_bytes()), timeout=60)

    def snapshot(self, step: int, ranks: list[int] | None = None) -> Generation:
        """All (or some) ranks snapshot a step."""
        for rank in range(len(self.nodes)) if ranks is None else ranks:
            self.commit(rank, step, self.reserve(rank, step))
        return self.generation(step)

    def wait(self, generation: Generation, status: str = "protected", timeout_s: float = 20.0) -> tuple[int, int]:
        """See `Coordinator.wait`."""
        from ray_jax_ckpt.model.books import Status

        return ray.get(self.coordinator.wait.remote(generation, Status(status), timeout_s), timeout=60)

    def latest(self) -> int | None:
        """Step of the newest complete generation."""
        generation = ray.get(self.coordinator.latest.remote(), timeout=30)
        return None if generation is None else generation.step

    def held(self, rank: int) -> set[int]:
        """Steps of which a rank's store holds something."""
        inventory = ray.get(self.store(rank).inventory.remote(), timeout=30)
        return {report.generation.step for report in inventory.held}

    def read(self, located: Located, rank: int) -> tuple[np.ndarray, bool]:
        """The whole leaf as seen from a rank's node, and whether bytes came from other nodes."""
        assert self.decision is not None
        catalog = Catalog.of(Index.from_bytes(raw) for raw in located.indices)
        size = max(stored.item.box[0][1] for stored in catalog.shared(0))
        want = Want(((0, size),), catalog.shared(0), 1)
        secret = self.decision.secret
        with Reader(located, self.nodes[rank][0], secret, verify=True, timeout_s=10) as reader:
            return np.array(reader.fetch([want], [np.dtype(np.uint8)])[0]), reader.used_peers

    def close(self) -> None:
        """Ends the coordinator and every store of the run."""
        if self.coordinator is not None:
            ray.kill(self.coordinator)
        for handle in fleet.living_stores(self.run).values():
            ray.kill(handle)


@contextmanager
def stub_group(run: str, nodes: list[tuple[str, str]], config: SnapshotConfig = CONFIG) -> Iterator[StubGroup]:
    """A group with a coordinator; everything of its run is ended at the end."""
    group = StubGroup(run, nodes, config).start_coordinator()
    try:
        yield group
    finally:
        group.close()


def flip_byte(group: StubGroup, rank: int, generation: Generation, part: str) -> None:
    """Flips one byte of a part in the memory of a rank's store."""
    view, _ = ray.get(group.store(rank).view.remote(generation), timeout=30)
    place = view.places[part]
    with open_segment(place.segment, writable=True) as mapping:
        mapping.view()[place.offset + place.num_bytes // 3] ^= 0x10
