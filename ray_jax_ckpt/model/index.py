"""What a rank's buffer of one generation contains, as bytes that travel and are replicated with it.

The layout (leaves, parts, places) is the same for every generation of one tree structure and is encoded once; the
contents (digests, host values, `data`, metrics) are encoded for each. JSON: read by stores that must not import jax,
and never executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Box, Generation

ALIGNMENT = 64
"""Bytes. Items start at multiples of it, so that views of any dtype are aligned and XLA may copy them at full speed."""


@dataclass(frozen=True)
class Item:
    """One shard: `num_bytes` at `offset` of a part are `box` of leaf number `leaf`, row-major little-endian."""

    leaf: int
    box: Box
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class PartLayout:
    """A part's place in the keeper's buffer, and its items."""

    id: str
    targets: tuple[int, ...]
    offset: int
    num_bytes: int
    items: tuple[Item, ...] = field(repr=False)
    pushed: bool = True
    """Whether this rank's store sends it to the targets (the first keeper does)."""


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
        skeleton: JSON-able description of the tree's inner nodes, for a restore without a template.
    """

    rank: int
    world_size: int
    structure: str
    leaves: tuple[Mapping[str, Any], ...] = field(repr=False)
    local: frozenset[int] = field(repr=False)
    parts: tuple[PartLayout, ...] = field(repr=False)
    skeleton: Mapping[str, Any] = field(default_factory=dict, repr=False)

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
                [[i.leaf, i.box, i.offset, i.num_bytes] for i in p.items],
            ]
            for p in self.parts
        ]
        head = {
            "rank": self.rank,
            "world_size": self.world_size,
            "structure": self.structure,
            "skeleton": self.skeleton,
        }
        return json.dumps({**head, "leaves": self.leaves, "local": sorted(self.local), "parts": parts}).encode()

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Layout:
        """The inverse of `encoded`, from parsed JSON."""
        parts = tuple(
            PartLayout(name, tuple(targets), offset, size, tuple(map(_item, items)), pushed)
            for name, targets, offset, size, pushed, items in raw["parts"]
        )
        leaves, local = tuple(raw["leaves"]), frozenset(raw["local"])
        return cls(raw["rank"], raw["world_size"], raw["structure"], leaves, local, parts, raw["skeleton"])


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
    metrics: Mapping[str, float] = field(default_factory=dict)
    blobs: Sequence[tuple[int, int, str]] = field(default=(), repr=False)

    def to_bytes(self) -> bytes:
        """JSON; the layout's own encoding is reused."""
        contents = {
            "generation": str(self.generation),
            "digests": self.digests,
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
                contents["digests"],
                {int(leaf): value for leaf, value in contents["values"]},
                contents["data"],
                contents["metrics"],
                tuple((offset, size, digest) for offset, size, digest in contents["blobs"]),
            )
        except (KeyError, TypeError) as error:
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
        placed.append(PartLayout(name, targets, start, offset, tuple(items), pushed))
        start += offset
    return tuple(placed)


def _item(raw: Sequence[Any]) -> Item:
    leaf, box, offset, size = raw
    return Item(leaf, tuple((a, b) for a, b in box), offset, size)
