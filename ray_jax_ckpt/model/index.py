"""What a rank's buffer of one generation contains, as bytes that travel and are replicated with it.

The layout (leaves, parts, places) is the same for every generation of one tree structure and is encoded once; the
contents (digests, host values, `data`, metrics) are encoded for each. JSON: read by stores that must not import jax,
and never executed. What grows with the number of leaves is JSON within JSON, read when it is asked for: who restores
gets the indices of all ranks of a group that may be large, and needs the items of a few.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, overload

from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Box, Generation

Value = TypeVar("Value")

ALIGNMENT = 64
"""Bytes. Items start at multiples of it, so that views of any dtype are aligned and XLA may copy them at full speed."""
_DENSE = (",", ":")


@dataclass(frozen=True)
class Item:
    """One shard: `num_bytes` at `offset` of a part are `box` of leaf number `leaf`, row-major little-endian."""

    leaf: int
    box: Box
    offset: int
    num_bytes: int


class Encoded(Sequence[Value]):
    """A sequence in its JSON encoding, decoded when it is first looked into. Raises ValueError then if it is none."""

    def __init__(self, text: str, decode: Callable[[Any], Value]) -> None:
        self._text, self._decode = text, decode

    @cached_property
    def _values(self) -> tuple[Value, ...]:
        try:
            return tuple(map(self._decode, json.loads(self._text)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not the index of a snapshot: {error!r}") from error

    @overload
    def __getitem__(self, at: int) -> Value: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Value]: ...
    def __getitem__(self, at: Any) -> Any:
        return self._values[at]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._values == tuple(other)

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class Region:
    """Leaves of which a part holds the same boxes.

    Attributes:
        leaves: Their numbers as runs, such as "0-17,20": most ranks hold other boxes of the same leaves, so that these
            strings are equal.
        boxes: In the order of the items.
    """

    leaves: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class PartLayout:
    """A part's place in the keeper's buffer, and its items."""

    id: str
    targets: tuple[int, ...]
    offset: int
    num_bytes: int
    items: Sequence[Item] = field(repr=False)
    pushed: bool = True
    """Whether this rank's store sends it to the targets (the first keeper does)."""
    regions: tuple[Region, ...] = field(default=(), repr=False)
    """What of which leaves is in it: tells who needs it without its items."""


@dataclass(frozen=True)
class Layout:
    """Where everything is in one rank's buffer.

    Attributes:
        rank: Whose.
        world_size: Ranks of the group.
        structure: Digest of the global tree, its shardings and placement; equal on all ranks.
        leaves: One JSON-able description per leaf of the tree, in tree order.
        local: Leaves that are this rank's own (host values, numpy, process-local arrays), not shards of a global array.
        parts: Parts that this rank keeps.
        skeleton: JSON that describes the tree's inner nodes, for a restore without a template.
        orbax: Orbax's metadata files of the tree, which only a process with JAX can make; "" where they are not needed.
            See `storage.plan.orbax_of`.
    """

    rank: int
    world_size: int
    structure: str
    leaves: Sequence[Mapping[str, Any]] = field(repr=False)
    local: frozenset[int] = field(repr=False)
    parts: tuple[PartLayout, ...] = field(repr=False)
    skeleton: str = field(default="{}", repr=False)
    orbax: str = field(default="", repr=False)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return max((part.offset + part.num_bytes for part in self.parts), default=0)

    @property
    def host_part(self) -> PartLayout:
        """The part with what is this rank's own."""
        return next(part for part in self.parts if part.id == host_part_id(self.rank))

    def with_room(self, num_bytes: int) -> Layout:
        """The same with so many more bytes at the end of the host part, which is the last in the buffer."""
        host = self.host_part
        if host.offset + host.num_bytes != self.num_bytes:
            raise ValueError(f"Behind part {host.id} there is another one.")
        wider = replace(host, num_bytes=align(host.num_bytes) + num_bytes)
        return replace(self, parts=tuple(wider if part is host else part for part in self.parts))

    @cached_property
    def encoded(self) -> bytes:
        """JSON of this layout."""
        parts = [
            [
                p.id,
                p.targets,
                p.offset,
                p.num_bytes,
                p.pushed,
                [[region.leaves, region.boxes] for region in p.regions],
                json.dumps([[i.leaf, i.box, i.offset, i.num_bytes] for i in p.items], separators=_DENSE),
            ]
            for p in self.parts
        ]
        whole = {
            "rank": self.rank,
            "world_size": self.world_size,
            "structure": self.structure,
            "leaves": json.dumps(list(self.leaves), separators=_DENSE),
            "local": sorted(self.local),
            "parts": parts,
            "skeleton": self.skeleton,
            "orbax": self.orbax,
        }
        return json.dumps(whole, separators=_DENSE).encode()

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Layout:
        """The inverse of `encoded`, from parsed JSON."""
        parts = tuple(
            PartLayout(name, tuple(targets), offset, size, Encoded(items, _item), pushed, tuple(map(_region, regions)))
            for name, targets, offset, size, pushed, regions, items in raw["parts"]
        )
        head = raw["rank"], raw["world_size"], raw["structure"]
        return cls(*head, Encoded(raw["leaves"], dict), frozenset(raw["local"]), parts, raw["skeleton"], raw["orbax"])


@dataclass(frozen=True)
class Index:
    """A layout and what one generation put there.

    Attributes:
        generation: Which.
        layout: Where things are.
        digests: Per part, one digest per item; "" where verification is off.
        values: Encoded host values by leaf number.
        data: Encoded per-process `data`, or None if the rank gave none.
        metrics: Of this rank.
        blobs: Large contents of `data`, which lie in the host part behind its items: (offset in the part, bytes,
            digest) each.
    """

    generation: Generation
    layout: Layout
    digests: Mapping[str, Sequence[str]] = field(repr=False)
    values: Mapping[int, Any] = field(default_factory=dict, repr=False)
    data: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    blobs: Sequence[tuple[int, int, str]] = field(default=(), repr=False)

    def to_bytes(self) -> bytes:
        """JSON; the layout's own encoding is reused."""
        contents = {
            "generation": str(self.generation),
            "digests": {part: json.dumps(list(found), separators=_DENSE) for part, found in self.digests.items()},
            "values": list(self.values.items()),
            "data": self.data,
            "metrics": self.metrics,
            "blobs": self.blobs,
        }
        return b'{"layout":' + self.layout.encoded + b',"contents":' + json.dumps(contents).encode() + b"}"

    @classmethod
    def from_bytes(cls, raw: bytes) -> Index:
        """The inverse of `to_bytes`. Raises ValueError for what is none."""
        try:
            tree = json.loads(raw)
            contents = tree["contents"]
            return cls(
                Generation.parse(contents["generation"]),
                Layout.decode(tree["layout"]),
                {part: Encoded(text, str) for part, text in contents["digests"].items()},
                {int(leaf): value for leaf, value in contents["values"]},
                contents["data"],
                contents["metrics"],
                tuple((offset, size, digest) for offset, size, digest in contents["blobs"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"Not the index of a snapshot: {error!r}") from error

    def checks(self, part: PartLayout) -> Iterable[tuple[int, int, str]]:
        """(offset in the part, length, digest) of everything in it."""
        yield from ((i.offset, i.num_bytes, d) for i, d in zip(part.items, self.digests[part.id], strict=True))
        if part.id == host_part_id(self.layout.rank):
            yield from self.blobs


def align(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lay_out(
    parts: Sequence[tuple[str, tuple[int, ...], bool, Sequence[tuple[int, Box, int]]]],
) -> tuple[PartLayout, ...]:
    """Places parts one behind the other, and their items in them.

    Args:
        parts: (id, targets, pushed, [(leaf, box, num_bytes)]) of each part.
    """
    placed, start = [], 0
    for name, targets, pushed, contents in parts:
        items, offset = [], 0
        for leaf, box, size in contents:
            items.append(Item(leaf, box, offset, size))
            offset = align(offset + size)
        placed.append(PartLayout(name, targets, start, offset, tuple(items), pushed, _regions(items)))
        start += offset
    return tuple(placed)


def _regions(items: Iterable[Item]) -> tuple[Region, ...]:
    boxes: dict[int, list[Box]] = defaultdict(list)
    for item in items:
        boxes[item.leaf].append(item.box)
    alike: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for leaf, found in sorted(boxes.items()):
        alike[tuple(found)].append(leaf)
    return tuple(Region(_runs(leaves), found) for found, leaves in alike.items())


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs, such as "0-17,20"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def numbers(runs: str) -> Iterator[int]:
    """The numbers in `Region.leaves`."""
    for run in runs.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _region(raw: Sequence[Any]) -> Region:
    leaves, boxes = raw
    return Region(str(leaves), tuple(map(_box, boxes)))


def _item(raw: Sequence[Any]) -> Item:
    leaf, box, offset, size = raw
    return Item(leaf, _box(box), offset, size)


def _box(raw: Sequence[Any]) -> Box:
    return tuple((start, stop) for start, stop in raw)
