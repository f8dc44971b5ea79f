"""A group of any size made of plain data, and the package's own decisions about it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.placement import Part, concerned, host_part_id, partners, place, shards_of
from ray_jax_ckpt.model.recovery import Catalog, Read, Want, plan_reads
from ray_jax_ckpt.model.shards import Box, Generation

ROWS, COLUMNS, ITEMSIZE = 16, 1024, 4
DIGEST = "0123456789abcdef"


class Paper:
    """A group of workers, `per_node` on each node, with a state of equal leaves sharded over them.

    Args:
        workers: In the group.
        per_node: Workers on a node.
        leaves: Of the state; each has `ROWS` rows per shard.
        replicas: How often the whole state is held; a replica is `workers / replicas` neighbouring ranks.
        copies: Copies wanted.
    """

    def __init__(self, workers: int, per_node: int, leaves: int, replicas: int, copies: int) -> None:
        if workers % replicas or workers % per_node:
            raise SystemExit(f"{workers} workers cannot be divided into {replicas} replicas on nodes of {per_node}")
        self.workers, self.per_node, self.leaves, self.copies = workers, per_node, leaves, copies
        self.domains = tuple(f"node{rank // per_node}" for rank in range(workers))
        self.shards = workers // replicas
        holders = {self.box(s): tuple(range(s, workers, self.shards)) for s in range(self.shards)}
        # Leaves that are sharded alike share their map, as they do in the package.
        self.map = [(number, holders, ITEMSIZE) for number in range(leaves)]

    @property
    def state_bytes(self) -> int:
        """One copy of the state."""
        return self.leaves * self.shards * ROWS * COLUMNS * ITEMSIZE

    def box(self, shard: int) -> Box:
        """Region of a shard."""
        return (shard * ROWS, (shard + 1) * ROWS), (0, COLUMNS)

    def parts_of(self, rank: int) -> list[Part]:
        """What a rank keeps: the plan that it makes at its first snapshot."""
        ranks = concerned(self.domains[rank], self.domains, self.copies)
        shards = shards_of(self.map, ranks, self.domains, self.copies)
        return [part for part in place(shards, self.domains, self.copies) if rank in part.keepers]

    def index_of(self, rank: int, generation: Generation) -> Index:
        """The index that a rank commits."""
        contents = [
            (p.id, p.targets, p.keepers[0] == rank, [(s.leaf, s.box, s.num_bytes) for s in p.shards])
            for p in self.parts_of(rank)
        ]
        host = (host_part_id(rank), partners(rank, self.domains, self.copies), True, [])
        leaves = tuple(
            {"path": f"layer{number}", "shape": [self.shards * ROWS, COLUMNS]} for number in range(self.leaves)
        )
        layout = Layout(rank, self.workers, "paper", leaves, frozenset(), lay_out([*contents, host]))
        digests = {part.id: [DIGEST] * len(part.items) for part in layout.parts}
        return Index(generation, layout, digests, {}, {"position": 0}, {"loss": 0.0})

    def neighbours(self, rank: int) -> list[int]:
        """Ranks on the same node."""
        return [other for other in range(self.workers) if self.domains[other] == self.domains[rank]]

    def name(self, rank: int) -> str:
        """Store of a rank."""
        return f"store{rank}"

    def books(self, attempt: int = 1) -> Books:
        """With every store in it."""
        books = Books(self.copies)
        for rank, domain in enumerate(self.domains):
            books = books_.store_joined(books, self.name(rank), domain, attempt)
        return books_.group_formed(books, attempt, books.domains)

    def reports(self, index: Index) -> tuple[list[Held], dict[int, int]]:
        """What the stores say when a rank's generation is stored and pushed, and the bytes pushed by receiver."""
        layout, everything = index.layout, frozenset(part.id for part in index.layout.parts)
        own = Held(self.name(layout.rank), index.generation, self.workers, everything, everything, layout.structure)
        pushed, sizes = {}, Counter()
        for part in layout.parts:
            for target in part.targets if part.pushed else ():
                pushed.setdefault(target, set()).add(part.id)
                sizes[target] += part.num_bytes
        received = [
            Held(self.name(target), index.generation, self.workers, frozenset(ids), everything, layout.structure)
            for target, ids in pushed.items()
        ]
        return [own, *received], sizes


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the CPU seconds that it took: others may be using the machine."""
    start = time.process_time()
    value = action()
    return value, time.process_time() - start


def simulate(paper: Paper) -> dict[str, Any]:
    """A snapshot, and the restore after the death of a node."""
    plans = [timed(lambda rank=rank: paper.parts_of(rank))[1] for rank in range(0, paper.workers, paper.workers // 10)]
    indices = [paper.index_of(rank, Generation(1, 0, 10)) for rank in range(paper.workers)]
    placement = {"state_gb": round(paper.state_bytes / 1e9, 2), "placement_s_per_rank": _spread(plans)}
    return {**placement, **snapshot(paper, indices), **recovery(paper, indices)}


def snapshot(paper: Paper, indices: Sequence[Index]) -> dict[str, Any]:
    """One generation, from its commits to protected."""
    told = [paper.reports(index) for index in indices]
    reports = [one for first in (True, False) for mine, _ in told for one in (mine[:1] if first else mine[1:])]
    books, seconds = timed(lambda: _apply(paper.books(), reports))
    generation = Generation(1, 0, 10)
    assert books.status(generation) is Status.PROTECTED
    _, judged = timed(lambda: (books.complete(), books.releasable(), books.undercovered(generation)))
    moved = [(rank, target, size) for rank, (_, sizes) in enumerate(told) for target, size in sizes.items()]
    return {
        "messages": {
            # Ray calls: begin and commit by each worker, a report per buffer filled, a release for each store.
            "worker to own store": 2 * paper.workers,
            "store to coordinator": len(reports),
            "coordinator to stores": paper.workers,
            "pushes between stores": len(reports) - paper.workers,
        },
        "index_bytes_per_rank": _spread([len(index.to_bytes()) for index in indices[:: paper.workers // 10]]),
        "coordinator_s": {"all reports": round(seconds, 4), "one judgement": round(judged, 4)},
        "push": _traffic(paper, moved),
    }


def recovery(paper: Paper, indices: Sequence[Index]) -> dict[str, Any]:
    """A node dies and a spare one takes its ranks: what the new group reads from where."""
    generation, dead = indices[0].generation, paper.domains[paper.per_node]
    books = _apply(paper.books(), [report for index in indices for report in paper.reports(index)[0]])
    for name in [name for name, domain in books.domains.items() if domain == dead]:
        books = books_.store_died(books, name)
    (_, choice), decided = timed(lambda: books_.attempt_started(books, 2))
    assert choice == generation
    holders = {part: tuple(sorted(stores)) for part, stores in books.entries[generation].holders.items()}
    raw = [index.to_bytes() for index in indices]
    plans, reads = [], []
    for rank in range(paper.workers):
        lost = paper.domains[rank] == dead
        if lost or rank % (paper.workers // 10) == 0:
            near = [paper.name(r) for r in paper.neighbours(rank) if not lost]
            plan, seconds = timed(lambda rank=rank, near=near: _plan(paper, raw, rank, holders, near))
            plans.append(seconds)
            reads += [(int(read.holder.removeprefix("store")), rank, read.num_bytes) for read in plan] if lost else []
    return {
        "decision_s": round(decided, 4),
        "indices_mb": round(sum(map(len, raw)) / 1e6, 1),
        "recovery_plan_s_per_rank": _spread(plans),
        "restore_of_a_dead_node": _traffic(paper, reads),
    }


def _plan(
    paper: Paper, raw: Sequence[bytes], rank: int, holders: Mapping[str, Sequence[str]], near: Sequence[str]
) -> list[Read]:
    """What a rank does between the group's decision and its first read."""
    catalog = Catalog.of([Index.from_bytes(one) for one in raw])
    wants = [Want(paper.box(rank % paper.shards), catalog.shared(leaf), ITEMSIZE) for leaf in range(paper.leaves)]
    return plan_reads(wants, holders, near, seat=rank)


def _apply(books: Books, reports: Sequence[Held]) -> Books:
    for report in reports:
        books = books_.held(books, report)
    return books


def _traffic(paper: Paper, moved: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Bytes by node and by link, of (sender, receiver, bytes) triples of ranks."""
    out, into, links = Counter(), Counter(), Counter()
    for sender, receiver, size in moved:
        a, b = sender // paper.per_node, receiver // paper.per_node
        out[a] += size
        into[b] += size
        links[a, b] += size
    return {
        "total_gb": round(sum(out.values()) / 1e9, 3),
        "gb_out_of_a_node": _spread([value / 1e9 for value in out.values()]),
        "gb_into_a_node": _spread([value / 1e9 for value in into.values()]),
        "links_used": len(links),
        "gb_per_link": _spread([value / 1e9 for value in links.values()]),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 4), "max": round(max(values), 4), "n": len(values)}
