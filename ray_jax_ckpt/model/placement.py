"""Which rank keeps which shard, and who gets the other copies: a pure function of holders and failure domains."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ray_jax_ckpt.model.shards import Box, volume

Holders = Mapping[Box, tuple[int, ...]]
"""The ranks whose devices hold each unique region of one global array, in ascending order."""

NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Shard:
    """One unique region of one global array and the ranks whose devices hold it."""

    leaf: int
    box: Box
    num_bytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Shards that live and travel together: the unit in which copies are counted.

    Attributes:
        id: The same on every rank.
        keepers: Ranks that capture these shards from their own devices, each in another failure domain.
        targets: Ranks to whose stores the first keeper's store pushes them, in domains not covered yet.
        shards: What is in it, in layout order.
    """

    id: str
    keepers: tuple[int, ...]
    targets: tuple[int, ...]
    shards: tuple[Shard, ...] = field(default=(), repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards, without padding."""
        return sum(shard.num_bytes for shard in self.shards)


def host_part_id(rank: int) -> str:
    """Id of the part that holds a rank's index, host leaves, process-local arrays and `data`."""
    return f"h{rank}"


class Ring:
    """The failure domains in the order of their lowest ranks: who follows whom. Use `ring_of`, which keeps them.

    Ranks that are leaving, because their nodes are drained, get no copies, and those that they hold do not count. If
    all are leaving, all count.
    """

    def __init__(self, domains: Sequence[str], leaving: frozenset[int] = NOBODY) -> None:
        self.domains = tuple(domains)
        self.leaving = NOBODY if leaving.issuperset(range(len(domains))) else leaving
        self.members: Mapping[str, list[int]] = _ranks_by_domain(domains, NOBODY)
        self._staying = _ranks_by_domain(domains, self.leaving)
        self._names = sorted(self.members, key=lambda name: self.members[name][0])
        self._home = {name: number for number, name in enumerate(self._names)}
        self._position = {rank: at for ranks in self.members.values() for at, rank in enumerate(ranks)}

    def __len__(self) -> int:
        """Domains that copies can be in."""
        return len(self._staying)

    def following(self, rank: int) -> Iterator[int]:
        """One rank in each of the other domains, the next domain's first; last one in the domain of a leaving rank.

        Ranks of one domain are spread over the ranks of the next, so that no store receives from everybody.
        """
        home, position = self._home[self.domains[rank]], self._position[rank]
        for hop in range(1, len(self._names) + (rank in self.leaving)):
            ranks = self._staying.get(self._names[(home + hop) % len(self._names)])
            if ranks:
                yield ranks[position % len(ranks)]

    def usable(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """The holders that stay, or all if none does."""
        return tuple(rank for rank in holders if rank not in self.leaving) or holders


@functools.lru_cache(maxsize=4)
def ring_of(domains: tuple[str, ...], leaving: frozenset[int] = NOBODY) -> Ring:
    """The ring of a group; the same object for the same domains, since it is asked for once per shard."""
    return Ring(domains, leaving)


def partners(rank: int, domains: Sequence[str], copies: int, leaving: frozenset[int] = NOBODY) -> tuple[int, ...]:
    """Ranks that receive what `rank` alone holds: one in each of the next `copies - 1` failure domains.

    What a leaving rank holds goes to one more, since its own copy will be gone.

    Args:
        rank: The rank that has something to push.
        domains: Failure domain of each rank.
        copies: Copies wanted in all. With fewer domains than that, fewer partners are returned.
        leaving: See `Ring`.
    """
    ring = ring_of(tuple(domains), leaving)
    return tuple(itertools.islice(ring.following(rank), copies - (rank not in ring.leaving)))


def concerned(domain: str, domains: Sequence[str], copies: int, leaving: frozenset[int] = NOBODY) -> frozenset[int]:
    """Ranks whose shards a rank of `domain` has to know: its domain's, and those that push there what they alone hold.

    Of a group of a thousand these are a few dozen, so that planning does not grow with the group.
    """
    ring, everybody = ring_of(tuple(domains), leaving), range(len(domains))
    senders = (r for r in everybody if any(domains[p] == domain for p in partners(r, domains, copies, leaving)))
    return frozenset(ring.members[domain]) | frozenset(senders)


def shards_of(
    leaves: Sequence[tuple[int, Holders, int]],
    ranks: frozenset[int],
    domains: Sequence[str],
    copies: int,
    leaving: frozenset[int] = NOBODY,
) -> list[Shard]:
    """The shards that decide what the stores of `ranks` get, all that share their holders included.

    These are the shards that one of them holds, and those whose holders are in several domains, but too few: whom the
    first keeper of one of these pushes to depends on which domains have it already.

    Args:
        leaves: Number, holders by box, and bytes per element of every global leaf. Leaves that are sharded alike should
            share the mapping object: each is searched once.
        ranks: See `concerned`.
        domains: Failure domain of each rank.
        copies: Copies wanted.
        leaving: See `Ring`.
    """
    ring = ring_of(tuple(domains), leaving)
    wanted = min(copies, len(ring))

    def matters(holders: tuple[int, ...]) -> bool:
        keepers = ring.usable(holders)
        return not ranks.isdisjoint(keepers) or 1 < len({domains[rank] for rank in keepers}) < wanted

    near: dict[int, list[tuple[Box, tuple[int, ...], int]]] = {}
    for _, holders, _ in leaves:
        if id(holders) not in near:
            near[id(holders)] = [(box, held_by, volume(box)) for box, held_by in holders.items() if matters(held_by)]
    return [
        Shard(number, box, size * itemsize, held_by)
        for number, holders, itemsize in leaves
        for box, held_by, size in near[id(holders)]
    ]


def place(
    shards: Iterable[Shard], domains: Sequence[str], copies: int, leaving: frozenset[int] = NOBODY
) -> tuple[Part, ...]:
    """Assigns every shard `copies` places in distinct failure domains, or one per domain where there are fewer.

    Ranks that hold a shard anyway are used first (no bytes travel); what is missing then is pushed to the partners of
    the first keeper. Shards held by the same ranks are balanced among them by bytes. The result depends on nothing but
    the arguments, so that every rank computes the same.

    Args:
        shards: All unique shards, or all those that one rank holds: a shard's places do not depend on the others
            than those with the same holders.
        domains: Failure domain of each rank.
        copies: Copies wanted of each shard.
        leaving: See `Ring`. They keep what nobody else holds, and it is pushed to as many others as copies are wanted.

    Returns:
        The parts, ordered by id.
    """
    ring = ring_of(tuple(domains), leaving)
    groups: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for shard in shards:
        groups[ring.usable(shard.holders)].append(shard)
    kept: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for holders, members in groups.items():
        for shard, keepers in zip(members, _balance(members, holders, domains, copies), strict=True):
            kept[keepers].append(shard)
    parts = {(keepers, _missing(keepers, ring, copies)): members for keepers, members in kept.items()}
    return tuple(
        Part(_part_id(keepers, targets), keepers, targets, tuple(members))
        for (keepers, targets), members in sorted(parts.items())
    )


def stored_bytes(parts: Iterable[Part]) -> Mapping[int, tuple[int, int]]:
    """Per rank, the bytes of one generation that its store keeps of its own and receives from peers."""
    totals: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for part in parts:
        for rank in part.keepers:
            own, peer = totals[rank]
            totals[rank] = (own + part.num_bytes, peer)
        for rank in part.targets:
            own, peer = totals[rank]
            totals[rank] = (own, peer + part.num_bytes)
    return totals


def _balance(
    shards: Sequence[Shard], holders: tuple[int, ...], domains: Sequence[str], copies: int
) -> list[tuple[int, ...]]:
    """Keepers of each shard: the largest first, each to the least loaded domains and the least loaded rank in them."""
    ranks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank in holders:
        heapq.heappush(ranks[domains[rank]], (0, rank))
    loads = [(0, heap[0][1], name) for name, heap in ranks.items()]
    heapq.heapify(loads)
    chosen: list[tuple[int, ...]] = [()] * len(shards)
    for position in sorted(range(len(shards)), key=lambda i: (-shards[i].num_bytes, i)):
        size = shards[position].num_bytes
        picked = [heapq.heappop(loads) for _ in range(min(copies, len(loads)))]
        keepers = []
        for load, _, name in picked:
            rank_load, rank = heapq.heappop(ranks[name])
            keepers.append(rank)
            heapq.heappush(ranks[name], (rank_load + size, rank))
            heapq.heappush(loads, (load + size, ranks[name][0][1], name))
        chosen[position] = tuple(sorted(keepers))
    return chosen


def _missing(keepers: tuple[int, ...], ring: Ring, copies: int) -> tuple[int, ...]:
    covered = {ring.domains[rank] for rank in keepers if rank not in ring.leaving}
    needed = max(0, min(copies, len(ring)) - len(covered))
    elsewhere = (rank for rank in ring.following(keepers[0]) if ring.domains[rank] not in covered)
    return tuple(itertools.islice(elsewhere, needed))


def _part_id(keepers: tuple[int, ...], targets: tuple[int, ...]) -> str:
    return f"s{'.'.join(map(str, keepers))}>{'.'.join(map(str, targets))}"


def _ranks_by_domain(domains: Sequence[str], without: frozenset[int]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(domains):
        if rank not in without:
            members[name].append(rank)
    return dict(members)
