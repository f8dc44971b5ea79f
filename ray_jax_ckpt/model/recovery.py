"""Which bytes a restoring rank reads from where: pure functions on indices and holders."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_jax_ckpt.errors import RestoreError, SnapshotLostError
from ray_jax_ckpt.model.catalog import Catalog, Items, Stored
from ray_jax_ckpt.model.index import ALIGNMENT
from ray_jax_ckpt.model.shards import Box, covers, intersect, row_span, row_spans, volume

__all__ = [
    "RUN_BYTES",
    "Catalog",
    "NotHeldError",
    "Read",
    "Span",
    "Stored",
    "Want",
    "assign",
    "choose_push",
    "merge",
    "plan_reads",
]

RUN_BYTES = 32 << 10
"""What asking another node for one more run costs, in bytes that could travel instead: about 10 us of both sides."""
# Between these sizes is what one holder is asked for at a time: small items stay together, large ones are cut.
_BUNDLE_BYTES = 1 << 20
_BAND_BYTES = 32 << 20

_Share = tuple[int, Stored, Box]
"""Position of a want, an item, and what of it the want takes."""


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a leaf to be read, with the items that hold it and the size of one element in bytes."""

    box: Box
    candidates: Items | Sequence[Stored]
    itemsize: int

    def found(self) -> list[tuple[Stored, Box]]:
        """The items that share elements with the box, and what they share."""
        items = self.candidates.about(self.box) if isinstance(self.candidates, Items) else self.candidates
        shared = ((stored, intersect(stored.item.box, self.box)) for stored in items)
        return [(stored, box) for stored, box in shared if box is not None]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a part that are fetched in one piece, and the reads that they serve."""

    part: str
    offset: int
    num_bytes: int
    reads: tuple[int, ...]


class NotHeldError(KeyError):
    """A wanted box that nobody can serve.

    Attributes:
        want: Its position.
        parts: Parts that would have it, and that no store has or could serve. Empty: no index knows of it.
        said: What the stores that have them said, by name.
        kind: What this is to the user.
    """

    def __init__(
        self,
        want: int,
        parts: Sequence[str] = (),
        said: Mapping[str, str] | None = None,
        kind: type[RestoreError] = SnapshotLostError,
    ) -> None:
        super().__init__(want)
        self.want, self.parts, self.said, self.kind = want, tuple(parts), dict(said or {}), kind


def plan_reads(
    wants: Sequence[Want],
    holders: Mapping[str, Sequence[str]],
    near: Iterable[str],
    *,
    seat: int = 0,
    loads: Mapping[str, int] | None = None,
) -> list[Read]:
    """Chooses, for every wanted box, which bytes to read from which holder. A box without elements needs none.

    No byte is read from two holders, so that what several boxes need is there to be fetched once. From another node
    come only the bytes needed, but for gaps that are cheaper to read than to leave out; on the reader's own node bytes
    are looked at in place, so whole rows are taken.

    Args:
        wants: What is needed.
        holders: Stores that hold a verified copy, per part.
        near: Stores on the reader's node.
        seat: The reader's number among those that read at the same time. See `assign`.
        loads: Bytes that this reader asks each holder for anyway.

    Raises:
        NotHeldError: A wanted box is not held completely.
    """
    close = set(near)
    bundles = _bundles(wants, _shares(wants, holders), {part for part, names in holders.items() if close & {*names}})
    chosen = assign([(part, size) for part, size, _ in bundles], holders, close, seat=seat, loads=loads)
    return [
        read
        for (_, _, shares), holder in zip(bundles, chosen, strict=True)
        for share in shares
        for read in _reads(share, wants[share[0]].itemsize, holder, holder in close)
    ]


def _shares(wants: Sequence[Want], holders: Mapping[str, Sequence[str]]) -> dict[tuple[str, int], list[_Share]]:
    """What of which item the wants take, by part and offset of the item."""
    shares: dict[tuple[str, int], list[_Share]] = defaultdict(list)
    for position, want in enumerate(wants):
        if volume(want.box) == 0:
            continue
        found = want.found()
        held = [(stored, shared) for stored, shared in found if holders.get(stored.part)]
        if not covers((stored.item.box for stored, _ in held), want.box):
            raise NotHeldError(position, sorted({stored.part for stored, _ in found if not holders.get(stored.part)}))
        for stored, shared in held:
            shares[stored.part, stored.item.offset].append((position, stored, shared))
    return shares


def _bundles(
    wants: Sequence[Want], shares: Mapping[tuple[str, int], list[_Share]], close: Collection[str]
) -> list[tuple[str, int, list[_Share]]]:
    """Part, bytes and shares of what is to come from one holder. Parts that are `close` are not cut."""
    bundles: list[tuple[str, int, list[_Share]]] = []
    for part, offset in sorted(shares):
        group = shares[part, offset]
        size = _size(wants, group)
        last = bundles[-1] if bundles else ("", 0, [])
        if last[0] == part and last[1] + size <= _BUNDLE_BYTES:
            bundles[-1] = part, last[1] + size, last[2]
            last[2].extend(group)
        elif size <= _BAND_BYTES or part in close:
            bundles.append((part, size, list(group)))
        else:
            bands = _bands(group, -(-size // _BAND_BYTES))
            bundles += [(part, _size(wants, band), band) for band in bands]
    return bundles


def _size(wants: Sequence[Want], group: Sequence[_Share]) -> int:
    return sum(volume(shared) * wants[position].itemsize for position, _, shared in group)


def _bands(group: Sequence[_Share], count: int) -> list[list[_Share]]:
    """Shares of one item cut along its first axis that can be, so that bands lie one behind the other in the item."""
    box = group[0][1].item.box
    axis = next(axis for axis, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = min(shared[axis][0] for *_, shared in group), max(shared[axis][1] for *_, shared in group)
    count = min(count, stop - start)
    cuts = [start + (stop - start) * i // count for i in range(count + 1)]
    bands = []
    for low, high in itertools.pairwise(cuts):
        band = (*box[:axis], (low, high), *box[axis + 1 :])
        both = ((position, stored, intersect(shared, band)) for position, stored, shared in group)
        bands.append([(position, stored, piece) for position, stored, piece in both if piece is not None])
    return [band for band in bands if band]


def _reads(share: _Share, itemsize: int, holder: str, close: bool) -> list[Read]:
    position, stored, shared = share
    box, start = stored.item.box, stored.item.offset
    spans = [row_span(shared, box, itemsize)] if close else row_spans(shared, box, itemsize, RUN_BYTES)
    pieces = [shared] if len(spans) == 1 else [intersect(shared, span) or span for _, _, span in spans]
    return [
        Read(position, stored, holder, start + offset, size, span, piece)
        for (offset, size, span), piece in zip(spans, pieces, strict=True)
    ]


def assign(
    pieces: Sequence[tuple[str, int]],
    holders: Mapping[str, Sequence[str]],
    near: Collection[str],
    *,
    seat: int = 0,
    loads: Mapping[str, int] | None = None,
) -> list[str]:
    """A holder for each piece (part, bytes): one on the reader's node, else the least loaded; the largest go first.

    Ranks plan on their own and at the same time. Where loads are equal, each begins with another holder, by its seat:
    otherwise all would ask the same one first, and those that need a single piece only that one.
    """
    totals: dict[str, int] = defaultdict(int, loads or {})
    chosen = [""] * len(pieces)
    for position in sorted(range(len(pieces)), key=lambda i: -pieces[i][1]):
        part, size = pieces[position]
        names = holders[part]
        close = [name for name in names if name in near] if near else []
        if close:
            chosen[position] = close[0]
            continue
        first = _turn(seat, part, len(names))
        _, _, name = min((totals[name], (i - first) % len(names), name) for i, name in enumerate(names))
        totals[name] += size
        chosen[position] = name
    return chosen


def _turn(seat: int, part: str, of: int) -> int:
    """As good as random, and the same everywhere: who needs the same bytes often sits at regular distances."""
    return 0 if of == 1 else (zlib.crc32(f"{seat} {part}".encode()) >> 8) % of


def merge(reads: Sequence[Read]) -> dict[str, list[Span]]:
    """What to ask each holder for so that no byte travels twice. Reads that touch or overlap are one piece."""
    order = sorted(range(len(reads)), key=lambda i: (reads[i].holder, reads[i].stored.part, reads[i].offset))
    groups: list[list[int]] = []
    where, stop = ("", ""), 0
    for i in order:
        read = reads[i]
        # Between two items there is nothing but padding.
        if (read.holder, read.stored.part) != where or read.offset >= stop + ALIGNMENT:
            groups.append([])
            where, stop = (read.holder, read.stored.part), read.offset
        groups[-1].append(i)
        stop = max(stop, read.offset + read.num_bytes)
    spans: dict[str, list[Span]] = defaultdict(list)
    for group in groups:
        first = reads[group[0]]
        stop = max(reads[i].offset + reads[i].num_bytes for i in group)
        spans[first.holder].append(Span(first.stored.part, first.offset, stop - first.offset, tuple(group)))
    return spans


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
