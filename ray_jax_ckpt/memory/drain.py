"""Nodes that will be taken away and ranks that are gone: what is saved from them, and without them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray._private.state import state

from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.announce import Announcer
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.survivors import stand_in

logger = logging.getLogger(__name__)

POLL_S = 1.0
ASK_TIMEOUT_S = 10.0
# A second snapshot is announced so long before the deadline, or when two thirds of the time are over.
LAST_CHANCE_S = 10.0
# What a rank's store had to say may still be on its way when its death is known.
LATE_REPORT_S = 2.0


class Drain:
    """Watches Ray's draining nodes, for use in the coordinator's event loop.

    What their stores hold is copied elsewhere at once. If ranks of the group run there, a snapshot is announced: when
    the drain is seen, again shortly before the deadline, and when ranks are gone, then to the others only.

    Attributes:
        saved: Told of the position of each snapshot that is announced: restores in the attempt, and step.
    """

    def __init__(self, ledger: Ledger, announcer: Announcer, record: Callable[..., None]) -> None:
        self._ledger, self._announcer, self._record = ledger, announcer, record
        self._asking: asyncio.Future[Any] | None = None
        self._seen: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._reasons: set[str] = set()
        self._gone: dict[int, float] = {}
        self._last_chance: float | None = None
        self._announcing = False
        self._stood_in: set[Generation] = set()
        self.saved: Callable[[int, int], None] = lambda restores, step: None

    # What is known.

    @property
    def nodes(self) -> dict[str, int]:
        """Draining nodes with their deadlines in milliseconds since the epoch; 0 for none."""
        return self._told | self._seen

    def leaving(self) -> frozenset[int]:
        """Ranks of the group that run there."""
        return frozenset(member.rank for member in self._ledger.members if member.node_id in self.nodes)

    def begin(self) -> None:
        """A new group: whoever was gone has been replaced. It is placed around the nodes that drain already."""
        self._told, self._gone, self._last_chance, self._stood_in = {}, {}, None, set()
        self._reasons = {f"drain {node}" for node in self.nodes}
        self._update_books()

    async def preempted(self, ranks: Iterable[int], deadline_ms: int) -> None:
        """Ray Train says that these ranks will lose their nodes: those, and what fails together with them."""
        gone = set(ranks)
        self._told = {member.node_id: deadline_ms for member in self._ledger.members if member.rank in gone}
        await self._look()

    async def gone(self, ranks: Iterable[int]) -> None:
        """These ranks' processes are dead."""
        for rank in set(ranks) - self._gone.keys():
            self._gone[rank] = time.monotonic()
            self._record("rank_gone", rank=rank)
        await self._look()

    # Looking.

    async def watch(self) -> None:
        """Looks again and again. Never raises."""
        while True:
            try:
                await self._ask()
                await self._look()
                await self._settle_without()
            except Exception:
                logger.exception("Looking after draining nodes failed; trying again.")
            await asyncio.sleep(POLL_S)

    async def _ask(self) -> None:
        # One question at a time: the threads of one that hangs would add up.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().run_in_executor(None, self._ray_says)
        done, _ = await asyncio.wait([self._asking], timeout=ASK_TIMEOUT_S)
        if done:
            self._seen, dead = self._asking.result()
            await self.gone(member.rank for member in self._ledger.members if member.node_id in dead)

    def _ray_says(self) -> tuple[dict[str, int], set[str]]:
        """Draining nodes, and those nodes of the group that are dead. Blocks.

        Ray Train's own watcher takes the first from the same place; `ray.nodes()` does not show it.
        """
        draining = dict(state.get_draining_nodes())
        lost = [m for m in self._ledger.members if self._ledger.roster.name(m) not in self._ledger.books.domains]
        nodes: list[dict[str, Any]] = ray.nodes() if lost else []
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        return draining, {member.node_id for member in lost if member.node_id not in alive}

    async def _look(self) -> None:
        if self._update_books():
            self._ledger.restore_copies()
            await self._ledger.notify()
        due = self._due()
        if due - self._reasons and not self._announcing:
            self._announcing = True
            self._ledger.spawn(self._announce(self._ledger.books.attempt, due))

    def _update_books(self) -> bool:
        """Whether stores drain that did not before."""
        books, nodes = self._ledger.books, self.nodes
        stores = frozenset(name for name in books.domains if fleet.node_of(name, nodes) is not None)
        self._ledger.books = books_.draining(books, stores)
        if not stores - books.draining:
            return False
        deadline_ms = min((ms for ms in nodes.values() if ms), default=None)
        deadline = None if deadline_ms is None else deadline_ms / 1000
        self._record("draining", nodes=sorted(nodes), ranks=sorted(self.leaving()), deadline=deadline)
        return True

    # Announcing.

    def _due(self) -> set[str]:
        """Why snapshots are to be announced, by now."""
        here = {m.node_id: self.nodes[m.node_id] for m in self._ledger.members if m.node_id in self.nodes}
        due = {f"drain {node}" for node in here}
        if here or any(reason.startswith("drain") for reason in self._reasons):
            due |= {f"gone {rank}" for rank in self._gone}
        deadline = min((ms / 1000 for ms in here.values() if ms), default=None)
        if deadline is None:
            self._last_chance = None
        elif self._last_chance is None:
            self._last_chance = deadline - min(LAST_CHANCE_S, max(0.0, deadline - time.time()) / 3)
        elif time.time() >= self._last_chance:
            due.add("deadline")
        return due

    async def _announce(self, attempt: int, due: set[str]) -> None:
        try:
            ranks = frozenset(member.rank for member in self._ledger.members) - self._gone.keys()
            leaving = self.leaving()
            named = await self._announcer.announce(attempt, ranks, leaving) if ranks else None
            if named is not None and attempt == self._ledger.books.attempt:
                self._reasons |= due
                self.saved(*named.position)
                self._record("snapshot_announced", step=named.position[1], leaving=sorted(leaving), why=sorted(due))
        finally:
            self._announcing = False

    # Without those who are gone.

    async def _settle_without(self) -> None:
        """Snapshots that wait for nobody but ranks that are gone become complete without them, or are given up."""
        if self._ledger.books.newest() in self._stood_in:
            # What was made up for a rank has no peer that it is pushed to.
            self._ledger.restore_copies()
        now = time.monotonic()
        gone = {host_part_id(rank): rank for rank, since in self._gone.items() if now - since > LATE_REPORT_S}
        books = self._ledger.books
        for generation in sorted(books.entries, reverse=True):
            missing = books.missing(generation)
            open_ = generation.attempt == books.attempt and generation not in books.abandoned
            if open_ and missing and gone.keys() >= set(missing):
                await self._complete_without(generation, {gone[part] for part in missing})

    async def _complete_without(self, generation: Generation, ranks: set[int]) -> None:
        indices = await self._indices(generation)
        found = [stand_in(indices, rank) for rank in sorted(ranks)]
        keeper: Any = next(iter(self._ledger.roster.among(self._ledger.books.holding(generation)).values()), None)
        if keeper is None or generation not in self._ledger.books.entries:
            return
        if any(index is None for index in found):
            reason = f"ranks {sorted(ranks)} are gone, and with them what only they had of it"
            self._ledger.books = books_.abandoned(self._ledger.books, generation, reason)
            self._ledger.say_abandoned([generation])
            await self._ledger.notify()
            return
        self._record("completed_without", step=generation.step, ranks=sorted(ranks))
        self._stood_in.add(generation)
        for index in found:
            if index is not None:
                await keeper.stand_in.remote(index.to_bytes())

    async def _indices(self, generation: Generation) -> list[Index]:
        handles = self._ledger.roster.among(self._ledger.books.holding(generation))
        answers: Mapping[str, Any] = await self._ledger.roster.ask(lambda store: store.view.remote(generation), handles)
        raw = {index.rank: index.raw for _, found in answers.values() for index in found}
        return [Index.from_bytes(text) for _, text in sorted(raw.items())]
