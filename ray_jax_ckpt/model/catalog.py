"""The items of a generation, found by global index range and never by rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ray_jax_ckpt.model.index import Index, Item, PartLayout, numbers
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Box

# Up to so many boxes are looked at one by one.
_FEW = 8


class Stored(NamedTuple):
    """An item, the part it is in, and its digest."""

    part: str
    item: Item
    digest: str


class Source:
    """A part with the digests of its items, which are not decoded before somebody needs one."""

    def __init__(self, part: PartLayout, digests: Sequence[str]) -> None:
        self._part, self._digests = part, digests

    @cached_property
    def by_leaf(self) -> Mapping[int, list[Stored]]:
        """The items of each leaf. Raises ValueError if there are not as many digests as items."""
        if len(self._digests) != len(self._part.items):
            raise ValueError(f"Part {self._part.id} has {len(self._part.items)} items, {len(self._digests)} digests.")
        found: dict[int, list[Stored]] = defaultdict(list)
        for item, digest in zip(self._part.items, self._digests, strict=True):
            found[item.leaf].append(Stored(self._part.id, item, digest))
        return found


@dataclass
class Area:
    """Boxes of leaves that are cut alike, and the sources that hold them.

    A leaf on a thousand workers has a thousand boxes, of which a reader needs a few.
    """

    boxes: list[Box] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)

    def add(self, boxes: Iterable[Box], source: Source) -> None:
        """A source holds these."""
        for box in boxes:
            self.boxes.append(box)
            self.sources.append(source)

    def about(self, box: Box) -> list[Source]:
        """Sources of all boxes that overlap `box`, and possibly of others, each once."""
        if len(self.boxes) <= _FEW or not box:
            return list(dict.fromkeys(self.sources))
        return list(dict.fromkeys(self.sources[position] for position in self._order.about(box)))

    @cached_property
    def _order(self) -> Order:
        return Order.of(self.boxes)


class Items:
    """The items of one leaf. Those that overlap a box are found without looking at all of them."""

    def __init__(self, leaf: int, areas: Sequence[Area]) -> None:
        self._leaf, self._areas = leaf, areas

    def __len__(self) -> int:
        return sum(len(area.boxes) for area in self._areas)

    def __iter__(self) -> Iterator[Stored]:
        for area in self._areas:
            for source in dict.fromkeys(area.sources):
                yield from source.by_leaf.get(self._leaf, ())

    def about(self, box: Box) -> list[Stored]:
        """Every item that shares elements with a box, and possibly some that do not."""
        sources = (source for area in self._areas for source in area.about(box))
        return [stored for source in sources for stored in source.by_leaf.get(self._leaf, ())]


@dataclass(frozen=True)
class Order:
    """Boxes sorted along the axis that tells most of them apart.

    Attributes:
        axis: Which.
        longest: Longest range on it.
        starts: Where they begin on it, ascending.
        positions: Which boxes those are.
    """

    axis: int
    longest: int
    starts: list[int] = field(repr=False)
    positions: list[int] = field(repr=False)

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Order:
        """Sorts boxes of one array, of at least one dimension."""
        axis = max(range(len(boxes[0])), key=lambda axis: len({box[axis] for box in boxes}))
        ranges = [box[axis] for box in boxes]
        positions = sorted(range(len(boxes)), key=ranges.__getitem__)
        longest = max(stop - start for start, stop in ranges)
        return cls(axis, longest, [ranges[i][0] for i in positions], positions)

    def about(self, box: Box) -> list[int]:
        """Positions of all boxes that overlap `box`, and possibly of others."""
        start, stop = box[self.axis]
        return self.positions[bisect_left(self.starts, start - self.longest + 1) : bisect_left(self.starts, stop)]


class Catalog:
    """The items of a generation by leaf, from all ranks' indices."""

    def __init__(self) -> None:
        self._areas: dict[str, Area] = defaultdict(Area)
        self._local: dict[int, Source] = {}

    @classmethod
    def of(cls, indices: Iterable[Index]) -> Catalog:
        """Collects the parts of all ranks' indices; one kept by several ranks, once."""
        catalog, seen = cls(), set()
        for index in indices:
            for part in index.layout.parts:
                if part.id not in seen:
                    seen.add(part.id)
                    catalog._add(index, part)
        return catalog

    def shared(self, leaf: int) -> Items:
        """Items of a global array: the same for everybody."""
        return Items(leaf, self._by_leaf.get(leaf, ()))

    def local(self, rank: int, leaf: int) -> Items:
        """Items that are one rank's own."""
        source = self._local.get(rank)
        boxes = [] if source is None else [stored.item.box for stored in source.by_leaf.get(leaf, ())]
        return Items(leaf, [] if source is None else [Area(boxes, [source] * len(boxes))])

    def _add(self, index: Index, part: PartLayout) -> None:
        source = Source(part, index.digests[part.id])
        if part.id == host_part_id(index.layout.rank):
            self._local[index.layout.rank] = source
            return
        for region in part.regions:
            self._areas[region.leaves].add(region.boxes, source)

    @cached_property
    def _by_leaf(self) -> Mapping[int, list[Area]]:
        found: dict[int, list[Area]] = defaultdict(list)
        for leaves, area in self._areas.items():
            for leaf in numbers(leaves):
                found[leaf].append(area)
        return found
