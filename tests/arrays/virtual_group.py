"""Groups of several processes that share this one's devices: each has its own, plans, captures and restores with the
real code, and stores are plain memory."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
from stored_state import aligned, digested

from ray_jax_ckpt.arrays import assemble, plan, tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.arrays.plan import HolderMaps, Topology, capture, make_plan
from ray_jax_ckpt.errors import CheckpointError, StoreError
from ray_jax_ckpt.memory.messages import Located, StoreView
from ray_jax_ckpt.memory.reader import Reader
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import Read, Span
from ray_jax_ckpt.model.shards import Box, Generation, box_of, whole, within

GENERATION = Generation(1, 0, 7)


def process_of(device: Any, per_process: int) -> int:
    """Which virtual process a device belongs to."""
    return device.id // per_process


def only_in(sharding: Any, shape: tuple[int, ...], process: int, per_process: int) -> list[tuple[Any, Box]]:
    """The devices of a virtual process under a sharding, and what they hold."""
    indices = sharding.devices_indices_map(shape).items()
    return [(d, box_of(index, shape)) for d, index in indices if process_of(d, per_process) == process]


@contextlib.contextmanager
def _planning(per_process: int) -> Iterator[None]:
    class Maps(HolderMaps):
        def of(self, sharding: Any, shape: tuple[int, ...]) -> Any:
            found = defaultdict(set)
            for device, index in sharding.devices_indices_map(shape).items():
                found[box_of(index, shape)].add(process_of(device, per_process))
            key = (sharding, shape)
            return self._maps.setdefault(key, {box: tuple(sorted(ranks)) for box, ranks in found.items()})

    everything = mock.patch.object(plan, "_is_global", lambda leaf, topology: isinstance(leaf, jax.Array))
    with mock.patch.object(plan, "HolderMaps", Maps), everything:
        yield


@dataclass
class VirtualStores:
    """What the stores of a group hold of one generation.

    Attributes:
        indices: In rank order.
        parts: By store and part. A store's name is its rank's number, and so is its node's.
    """

    indices: list[Index]
    parts: dict[str, dict[str, np.ndarray]] = field(repr=False)

    @property
    def located(self) -> Located:
        """What survives."""
        every = sorted({part.id for index in self.indices for part in index.layout.parts})
        holders = {part: tuple(sorted(name for name, held in self.parts.items() if part in held)) for part in every}
        stores = {name: StoreView(name, f"node {name}", name) for name in self.parts}
        raw = tuple(index.to_bytes() for index in self.indices)
        return Located(GENERATION, len(self.indices), raw, holders, stores)

    def copies(self) -> dict[str, list[str]]:
        """The stores of each part."""
        return {part: list(names) for part, names in self.located.holders.items()}


def snapshot(state: Any, *, processes: int, per_process: int, copies: int) -> VirtualStores:
    """A generation that `processes` take, each in a failure domain of its own, and whose pushes have arrived."""
    flat, domains = tree.flatten(state), tuple(f"d{rank}" for rank in range(processes))
    indices, parts = [], {str(rank): {} for rank in range(processes)}
    for rank in range(processes):
        with _planning(per_process):
            made = make_plan(flat, Topology(rank, domains, copies))
        captured = capture(made, flat)
        buffer = aligned(made.layout.num_bytes)
        index = Index(GENERATION, made.layout, captured.write(buffer, digested), captured.values)
        for part in made.layout.parts:
            content = buffer[part.offset : part.offset + part.num_bytes]
            for holder in (rank, *(part.targets if part.pushed else ())):
                parts[str(holder)][part.id] = content
        indices.append(index)
    return VirtualStores(indices, parts)


class MemoryReader(Reader):
    """A reader whose stores are plain memory, and may fail.

    Attributes:
        failing: What a store says, by name, once for each time that it is asked; then it serves.
        pulled: Bytes taken from each store on another node, by (part, first byte, size).
    """

    def __init__(self, stores: VirtualStores, node: int, failing: Mapping[str, Sequence[CheckpointError]] = {}) -> None:
        self.suspected: list[str] = []
        super().__init__(
            stores.located,
            f"node {node}",
            "",
            verify=True,
            timeout_s=10,
            seat=node,
            suspect=lambda holder, said: self.suspected.append(holder),
        )
        self._parts = stores.parts
        self.failing = {name: list(errors) for name, errors in failing.items()}
        self.pulled: dict[str, list[tuple[str, int, int]]] = defaultdict(list)

    def _fail(self, holder: str) -> None:
        if self.failing.get(holder):
            raise self.failing[holder].pop(0)

    def _view(self, read: Read) -> np.ndarray:
        self._fail(read.holder)
        view = self._parts[read.holder][read.stored.part][read.offset : read.offset + read.num_bytes]
        view.flags.writeable = False
        return view

    def _pull(self, holder: str, spans: Sequence[Span], buffers: Sequence[np.ndarray], deadline: float) -> None:
        self._fail(holder)
        self.fetched[holder] += sum(span.num_bytes for span in spans)
        self.pulled[holder] += [(span.part, span.offset, span.num_bytes) for span in spans]
        for span, buffer in zip(spans, buffers, strict=True):
            source = self._parts[holder][span.part][span.offset : span.offset + span.num_bytes]
            if source.nbytes != buffer.nbytes:
                raise StoreError("asked for bytes behind the end of a part")
            buffer[:] = source


class _Pieces:
    """In place of device arrays, of which one virtual process cannot have all: what each device would get."""

    def __init__(self, targets: Sequence[Any]) -> None:
        self._targets, self._taken = targets, defaultdict(dict)

    def take(self, boxes: Sequence[tuple[int, Box]], arrays: Sequence[np.ndarray]) -> None:
        for (number, box), array in zip(boxes, arrays, strict=True):
            self._taken[number][box] = np.array(array)

    def leaf(self, number: int) -> Any:
        target = self._targets[number]
        if target.kind == "numpy":
            return next(iter(self._taken[number].values()))
        return {device: (box, self._taken[number][box]) for device, box in target.places}


def restore_pieces(
    stores: VirtualStores, template: Any, *, process: int, processes: int, per_process: int, reader: MemoryReader
) -> Any:
    """What one of several virtual processes gets: arrays as {device: (box, content)}."""
    real = assemble._places

    def places(sharding: Any, spec: Any, shape: tuple[int, ...]) -> Any:
        return [(d, box) for d, box in real(sharding, spec, shape) if process_of(d, per_process) == process]

    with mock.patch.object(assemble, "_places", places), mock.patch.object(assemble, "Landing", _Pieces):
        return Assembler(stores.indices, process, processes).restore(template, None, Options(), reader.fetch)


def assert_pieces(found: dict[Any, tuple[Box, np.ndarray]], data: np.ndarray, expected: Sequence[tuple[Any, Box]]):
    """Every device got exactly its slice of the data, bit by bit."""
    assert [
        (device, box[: len(want)]) for (device, (box, _)), (_, want) in zip(found.items(), expected, strict=True)
    ] == [(device, box) for device, box in expected]
    for box, content in found.values():
        wanted = data[within(box, whole(data.shape))]
        assert content.dtype == wanted.dtype
        assert content.shape == wanted.shape
        assert content.tobytes() == wanted.tobytes()
