"""A group of any size made of plain data, and the package's own decisions about it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.books import Books, Held, Status
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.placement import Part, concerned, host_part_id, partners, place, shards_of
from ray_jax_ckpt.model.recovery import Catalog, Want, plan_reads
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

    def name(self, rank: int) -> str:
        """Store of a rank."""
        return f"store{rank}"

    def books(self, attempt: int = 1) -> Books:
        """With every store in it."""
        domains = {self.name(rank): domain for rank, domain in enumerate(self.domains)}
        return Books(self.copies, attempt, domains, frozenset(domains))

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
    """What it returns, and the seconds it took."""
    start = time.perf_counter()
    value = action()
    return value, time.perf_counter() - start


def snapshot(paper: Paper) -> dict[str, Any]:
    """One generation, from placement to protected."""
    plans = [timed(lambda rank=rank: paper.parts_of(rank))[1] for rank in range(0, paper.workers, paper.workers // 10)]
    indices = [paper.index_of(rank, Generation(1, 0, 10)) for rank in range(paper.workers)]
    told = [paper.reports(index) for index in indices]
    reports = [one for first in (True, False) for mine, _ in told for one in (mine[:1] if first else mine[1:])]
    books, seconds = timed(lambda: _apply(paper.books(), reports))
    generation = Generation(1, 0, 10)
    assert books.status(generation) is Status.PROTECTED
    _, judged = timed(lambda: (books.complete(), books.releasable(), books.undercovered(generation)))
    moved = [(rank, target, size) for rank, (_, sizes) in enumerate(told) for target, size in sizes.items()]
    return {
        "placement_s_per_rank": _spread(plans),
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


def recovery(paper: Paper) -> dict[str, Any]:
    """A node dies and a spare one takes its ranks: what the new group reads from where."""
    generation, dead = Generation(1, 0, 10), paper.domains[paper.per_node]
    indices = [paper.index_of(rank, generation) for rank in range(paper.workers)]
    books = _apply(paper.books(), [report for index in indices for report in paper.reports(index)[0]])
    for name in [name for name, domain in books.domains.items() if domain == dead]:
        books = books_.store_died(books, name)
    (_, choice), decided = timed(lambda: books_.attempt_started(books, 2))
    assert choice == generation
    holders = {part: tuple(sorted(stores)) for part, stores in books.entries[generation].holders.items()}
    raw = [index.to_bytes() for index in indices]
    decoded, decoding = timed(lambda: [Index.from_bytes(one) for one in raw])
    catalog, cataloguing = timed(lambda: Catalog.of(decoded))
    plans, reads = [], []
    for rank in range(paper.workers):
        lost = paper.domains[rank] == dead
        if not lost and rank % (paper.workers // 10):
            continue
        wants = [Want(paper.box(rank % paper.shards), catalog.shared[leaf], ITEMSIZE) for leaf in range(paper.leaves)]
        near = [] if lost else [paper.name(r) for r in range(paper.workers) if paper.domains[r] == paper.domains[rank]]
        plan, seconds = timed(lambda w=wants, n=near, r=rank: plan_reads(w, holders, n, seat=r))
        plans.append(seconds)
        reads += [(int(read.holder.removeprefix("store")), rank, read.num_bytes) for read in plan] if lost else []
    return {
        "decision_s": round(decided, 4),
        "recovery_plan": {
            "indices_mb": round(sum(map(len, raw)) / 1e6, 1),
            "decode_s": round(decoding, 3),
            "catalog_s": round(cataloguing, 3),
            "plan_s_per_rank": _spread(plans),
        },
        "restore_of_a_dead_node": _traffic(paper, reads),
    }


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
