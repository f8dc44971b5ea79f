"""The items of a generation, found by global index range and never by rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ray_jax_ckpt.model.index import Index, Item, PartLayout
from ray_jax_ckpt.model.shards import Box

# Up to so many items are looked at one by one.
_FEW = 8


class Stored(NamedTuple):
    """An item, the part it is in, and its digest."""

    part: str
    item: Item
    digest: str


Source = tuple[PartLayout, Sequence[str]]
"""A part and the digests of its items."""


class Items:
    """The items of one leaf. Those that overlap a box are found without looking at all of them.

    A leaf on a thousand workers has a thousand items, of which a reader needs a few: so items are told apart by
    position, and nothing is made for one before it is asked for.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._order: Order | None = None
        self._items: list[Item] = []
        self._sources: list[Source] = []
        self.add = self._items.append
        self.add_source = self._sources.append

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Stored]:
        return map(self.__getitem__, range(len(self._items)))

    def __getitem__(self, position: int) -> Stored:
        item, (part, digests) = self._items[position], self._sources[position]
        number = bisect_left(part.items, item.offset, key=lambda other: other.offset)
        # Behind an item without bytes another one begins at the same place.
        while part.items[number] is not item:
            number += 1
        return Stored(part.id, item, digests[number])

    def about(self, box: Box) -> list[Stored]:
        """Every item that shares elements with a box, and possibly some that do not."""
        if len(self._items) <= _FEW or not box:
            return list(self)
        if self._order is None:
            self._order = self._orders.of([item.box for item in self._items])
        return [self[position] for position in self._order.about(box)]


@dataclass(frozen=True)
class Order:
    """Boxes sorted along the axis that tells most of them apart.

    Attributes:
        boxes: As they came.
        axis: Which.
        longest: Longest range on it.
        starts: Where they begin on it, ascending.
        positions: Which boxes those are.
    """

    boxes: list[Box] = field(repr=False)
    axis: int
    longest: int
    starts: list[int] = field(repr=False)
    positions: list[int] = field(repr=False)

    @classmethod
    def of(cls, boxes: list[Box]) -> Order:
        """Sorts boxes of one array, of at least one dimension."""
        axis = max(range(len(boxes[0])), key=lambda axis: len({box[axis] for box in boxes}))
        ranges = [box[axis] for box in boxes]
        positions = sorted(range(len(boxes)), key=ranges.__getitem__)
        longest = max(stop - start for start, stop in ranges)
        return cls(boxes, axis, longest, [ranges[i][0] for i in positions], positions)

    def about(self, box: Box) -> list[int]:
        """Positions of all boxes that overlap `box`, and possibly of others."""
        start, stop = box[self.axis]
        return self.positions[bisect_left(self.starts, start - self.longest + 1) : bisect_left(self.starts, stop)]


class Orders:
    """Orders of lists of boxes. Most leaves of a tree are cut like others, and share one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Box, Box], list[Order]] = defaultdict(list)

    def of(self, boxes: list[Box]) -> Order:
        """The order of these boxes."""
        alike = self._known[len(boxes), boxes[0], boxes[-1]]
        order = next((order for order in alike if order.boxes == boxes), None)
        if order is None:
            order = Order.of(boxes)
            alike.append(order)
        return order


class Catalog:
    """The items of a generation by leaf, from all ranks' indices.

    Attributes:
        shared: Items of global arrays: the same for everybody.
        local: Items that are one rank's own, by (rank, leaf).
    """

    def __init__(self) -> None:
        orders = Orders()
        self.shared: Mapping[int, Items] = defaultdict(lambda: Items(orders))
        self.local: Mapping[tuple[int, int], Items] = defaultdict(lambda: Items(orders))

    @classmethod
    def of(cls, indices: Iterable[Index]) -> Catalog:
        """Collects the items of all ranks' indices; of a part kept by several ranks, once."""
        catalog, seen = cls(), set()
        for index in indices:
            for part in index.layout.parts:
                if part.id not in seen:
                    seen.add(part.id)
                    catalog._add(index, part)
        return catalog

    def _add(self, index: Index, part: PartLayout) -> None:
        local, rank, shared = index.layout.local, index.layout.rank, self.shared
        source = part, index.digests[part.id]
        if len(source[1]) != len(part.items):
            raise ValueError(f"Part {part.id} has {len(part.items)} items and {len(source[1])} digests.")
        for item in part.items:
            leaf = item.leaf
            items = self.local[rank, leaf] if leaf in local else shared[leaf]
            items.add(item)
            items.add_source(source)
