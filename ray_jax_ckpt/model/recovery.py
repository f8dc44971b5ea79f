"""Which bytes a restoring rank reads from where: pure functions on indices and holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_jax_ckpt.model.index import Index, Item
from ray_jax_ckpt.model.shards import Box, covers, intersect, row_span, volume


@dataclass(frozen=True)
class Stored:
    """An item, the part it is in, and its digest."""

    part: str
    item: Item
    digest: str


@dataclass(frozen=True)
class Read:
    """Bytes of one item that a wanted box needs.

    Attributes:
        want: Which of the wanted boxes.
        stored: Where they lie.
        holder: The store to read them from.
        offset: First byte, in the part.
        num_bytes: How many.
        span: The box that those bytes are.
        shared: What of `span` the wanted box takes.
    """

    want: int
    stored: Stored
    holder: str
    offset: int
    num_bytes: int
    span: Box
    shared: Box


@dataclass
class Catalog:
    """The items of a generation by leaf, from all ranks' indices: found by global index range, never by rank.

    Attributes:
        shared: Items of global arrays: the same for everybody.
        local: Items that are one rank's own, by (rank, leaf).
    """

    shared: dict[int, list[Stored]] = field(default_factory=lambda: defaultdict(list))
    local: dict[tuple[int, int], list[Stored]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, indices: Iterable[Index]) -> Catalog:
        """Collects the items of all ranks' indices; of a part kept by several ranks, once."""
        catalog, seen = cls(), set()
        for index in indices:
            for part in index.layout.parts:
                if part.id in seen:
                    continue
                seen.add(part.id)
                for item, digest in zip(part.items, index.digests[part.id], strict=True):
                    stored = Stored(part.id, item, digest)
                    if item.leaf in index.layout.local:
                        catalog.local[index.layout.rank, item.leaf].append(stored)
                    else:
                        catalog.shared[item.leaf].append(stored)
        return catalog


@dataclass(frozen=True)
class Want:
    """A box of a leaf to be read, with the items that hold it and the size of one element in bytes."""

    box: Box
    candidates: Sequence[Stored]
    itemsize: int


def plan_reads(wants: Sequence[Want], holders: Mapping[str, Sequence[str]], near: Iterable[str]) -> list[Read]:
    """Chooses, for every wanted box, which bytes to read from which holder. A box without elements needs none.

    Holders on the reader's own node come first; other bytes are spread over all holders of a part by load.

    Args:
        wants: What is needed.
        holders: Stores that hold a verified copy, per part.
        near: Stores on the reader's node.

    Raises:
        KeyError: The wanted box (its position in `wants` is the argument) is not held completely.
    """
    close, loads, reads = set(near), defaultdict(int), []
    for position, want in enumerate(wants):
        if volume(want.box) == 0:
            continue
        found = [s for s in want.candidates if holders.get(s.part)]
        if not covers((s.item.box for s in found), want.box):
            raise KeyError(position)
        for stored in found:
            shared = intersect(stored.item.box, want.box)
            if shared is None:
                continue
            offset, size, span = row_span(shared, stored.item.box, want.itemsize)
            holder = min(holders[stored.part], key=lambda name: (name not in close, loads[name], name))
            loads[holder] += size
            reads.append(Read(position, stored, holder, stored.item.offset + offset, size, span, shared))
    return reads


def choose_push(
    parts: Mapping[str, frozenset[str]],
    domains: Mapping[str, str],
    receivers: Mapping[str, str],
    wanted: int,
    damaged: Mapping[str, frozenset[str]] | None = None,
) -> list[tuple[str, str, str]]:
    """Copies to make so that parts are again in `wanted` distinct failure domains, load spread over the receivers.

    Args:
        parts: Living holders of each part that lacks copies.
        domains: Failure domain of every store whose copies count: the living ones that are not leaving. The others are
            only copied from.
        receivers: Stores that may get copies, with their domains.
        wanted: Distinct domains wanted.
        damaged: Stores that have lost a copy of a part and keep the room for it, per part: the first choice.

    Returns:
        (part, from store, to store) triples.
    """
    loads: dict[str, int] = defaultdict(int)
    pushes = []
    for part, stores in sorted(parts.items()):
        covered = {domains[store] for store in stores if store in domains}
        while len(covered) < wanted:
            free = [name for name, domain in receivers.items() if domain not in covered]
            if not free:
                break
            broken = (damaged or {}).get(part, ())
            target = min(free, key=lambda name: (name not in broken, loads[name], name))
            loads[target] += 1
            covered.add(receivers[target])
            pushes.append((part, min(stores), target))
    return pushes
