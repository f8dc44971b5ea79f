"""Which rank keeps which shard, and who gets the other copies: a pure function of holders and failure domains."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_jax_ckpt.model.shards import Box


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


def partners(rank: int, domains: Sequence[str], copies: int) -> tuple[int, ...]:
    """Ranks that receive what `rank` alone holds: one in each of the next `copies - 1` failure domains.

    Ranks of one domain are spread over the ranks of the next, so that no store receives from everybody.

    Args:
        rank: The rank that has something to push.
        domains: Failure domain of each rank.
        copies: Copies wanted in all. With fewer domains than that, fewer partners are returned.
    """
    members = _ranks_by_domain(domains)
    ring = sorted(members, key=lambda name: members[name][0])
    home = ring.index(domains[rank])
    position = members[domains[rank]].index(rank)
    following = (ring[(home + hop) % len(ring)] for hop in range(1, min(copies, len(ring))))
    return tuple(members[name][position % len(members[name])] for name in following)


def place(shards: Iterable[Shard], domains: Sequence[str], copies: int) -> tuple[Part, ...]:
    """Assigns every shard `copies` places in distinct failure domains, or one per domain where there are fewer.

    Ranks that hold a shard anyway are used first (no bytes travel); what is missing then is pushed to the partners of
    the first keeper. Shards held by the same ranks are balanced among them by bytes. The result depends on nothing but
    the arguments, so that every rank computes the same.

    Args:
        shards: All unique shards, or all those that one rank holds: a shard's places do not depend on the others
            than those with the same holders.
        domains: Failure domain of each rank.
        copies: Copies wanted of each shard.

    Returns:
        The parts, ordered by id.
    """
    groups: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for shard in shards:
        groups[shard.holders].append(shard)
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Shard]] = defaultdict(list)
    for holders, members in groups.items():
        for shard, keepers in zip(members, _balance(members, holders, domains, copies), strict=True):
            parts[keepers, _missing(keepers, domains, copies)].append(shard)
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


def _missing(keepers: tuple[int, ...], domains: Sequence[str], copies: int) -> tuple[int, ...]:
    covered = {domains[rank] for rank in keepers}
    needed = min(copies, len(set(domains))) - len(covered)
    if needed <= 0:
        return ()
    everywhere = partners(keepers[0], domains, len(set(domains)))
    return tuple(rank for rank in everywhere if domains[rank] not in covered)[:needed]


def _part_id(keepers: tuple[int, ...], targets: tuple[int, ...]) -> str:
    return f"s{'.'.join(map(str, keepers))}>{'.'.join(map(str, targets))}"


def _ranks_by_domain(domains: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(domains):
        members[name].append(rank)
    return members
