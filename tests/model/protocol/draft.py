"""One step of a run under way: what the actors do between two states, with every choice that faults leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.books import Books, Held, Statement
from ray_jax_ckpt.model.pushes import Queue
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Slots
from tests.model.protocol.world import Cell, Cells, Group, Push, Rank, Store, World, contents

EVERYTHING = frozenset(
    [
        "delay",
        "stall",
        "skip",
        "fail",
        "lose_push",
        "kill_store",
        "kill_domain",
        "kill_coordinator",
        "silence",
        "rot",
        "rollback",
    ]
)


@dataclass(frozen=True)
class Bounds:
    """How far an exploration goes.

    Attributes:
        layouts: Per attempt, the groups that it may have: the stores' names by rank.
        steps: Training steps.
        faults: How many may happen in a run; a new attempt without any other fault counts as none.
        kinds: What may go wrong.
        forced: Steps that are snapshotted with a handle which the user keeps.
        keeps: Whether handles may be kept for ever.
        repairs: Whether the newest generation is copied again when it lacks copies; if not, a push that has to wait for
            room is never given up.
        slow: In this attempt nothing is pushed before it ends.
        skips_freely: Stalling and skipping are no faults.
        copies: Copies wanted.
        ahead: By how many steps a rank may be ahead of another.
        learns: Whether a coordinator that was started again learns from the stores which group it serves.
    """

    layouts: tuple[tuple[tuple[str, ...], ...], ...]
    steps: int = 3
    faults: int = 2
    kinds: frozenset[str] = EVERYTHING
    forced: frozenset[int] = frozenset()
    keeps: bool = True
    repairs: bool = True
    slow: int = 0
    skips_freely: bool = False
    copies: int = 2
    learns: bool = True
    ahead: int = 9

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({name for layouts in self.layouts for layout in layouts for name in layout}))


class Draft:
    """A world that is being changed. Choices are taken from `choices` first, then always the first option."""

    def __init__(self, bounds: Bounds, cells: Cells, world: World, choices: tuple[int, ...] = ()) -> None:
        self.bounds, self.cells = bounds, cells
        self.layouts, self.line, self.choice = world.layouts, world.line, world.choice
        self.ranks = list(world.ranks)
        self._before = world.stores
        self.stores: dict[str, Store | None] = {
            name: cell and cell.value for name, cell in zip(bounds.names, world.stores, strict=True)
        }
        self.books, self.members_known = world.books, world.members_known
        self.pushing, self.delayed = set(world.pushing), set(world.delayed)
        self.faults, self.skipped = world.faults, world.skipped
        self.options: list[int] = []
        self.taken: list[int] = []
        self.notes: list[str] = []
        self._choices = choices

    def world(self) -> World:
        if self.books.value.freed:
            self.rewrite(trimmed, self._mentioned())
        stores = tuple(
            cell if (cell and cell.value) is store else store and self.cells.store(store)
            for cell, store in zip(self._before, self.stores.values(), strict=True)
        )
        return World(
            self.layouts, self.line, self.choice, tuple(self.ranks), stores, self.books,
            self.members_known, frozenset(self.pushing), frozenset(self.delayed), self.faults, self.skipped,
        )  # fmt: skip

    def _mentioned(self) -> frozenset[Generation]:
        """Generations that anybody has anything of, or that a message is about: others are forgotten everywhere."""
        found = {s.generation for store in self.up().values() for s in store.slots.value.used.values()}
        found |= {push.generation for push in self.pushing}
        for kind, *content in self.delayed:
            found |= {content[2]} if kind == "held" else content[2] if kind == "release" else set()
        return frozenset(found & self.books.value.freed)

    # Choices.

    def choose(self, options: int) -> int:
        taken = self._choices[len(self.taken)] if len(self.taken) < len(self._choices) else 0
        self.options.append(options)
        self.taken.append(taken)
        return taken

    def goes_wrong(self, kind: str, what: str) -> bool:
        """Whether this fault happens now; it may as long as there are some left."""
        free = self.bounds.skips_freely and kind == "stall"
        if kind not in self.bounds.kinds or not (self.faults or free) or not self.choose(2):
            return False
        self.faults -= not free
        self.notes.append(f"{kind}: {what}")
        return True

    # Values.

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.cells.call(function, *args)

    def rewrite(self, function: Callable[..., Any], *args: Any) -> None:
        """A transition of the books."""
        self.books = self.call(function, self.books, *args)

    def update(self, name: str, **changes: Any) -> None:
        store = self.stores[name]
        assert store is not None
        self.stores[name] = store._replace(**changes)

    def slots(self, name: str, function: Callable[..., Any], *args: Any) -> Exception | None:
        """A transition of a store's slots, or the error with which it is refused."""
        store = self.stores[name]
        assert store is not None
        result = self.call(function, store.slots, *args)
        if isinstance(result, Exception):
            return result
        used = {(slot.generation, slot.source) for slot in result.value.used.values()}
        self.stores[name] = store._replace(slots=result, rotten=store.rotten & used, dropped=store.dropped & used)
        return None

    @property
    def attempt(self) -> int:
        return len(self.layouts)

    @property
    def members(self) -> tuple[str, ...]:
        return self.layouts[-1]

    def up(self) -> dict[str, Store]:
        return {name: store for name, store in self.stores.items() if store is not None}

    def known(self, name: str) -> bool:
        """Whether the coordinator has heard of the store that has this name now."""
        store = self.stores[name]
        return store is not None and self.books.value.incarnations.get(name) == str(store.incarnation)

    # Messages.

    def send(self, *message: Any) -> None:
        """It arrives at once, or is under way for as long as can be."""
        if self.goes_wrong("delay", describe(message)):
            self.delayed.add(message)
        else:
            self.deliver(message)

    def deliver(self, message: tuple[Any, ...]) -> None:
        kind, *args = message
        getattr(self, f"_on_{kind}")(*args)

    def tell(self, name: str, generation: Generation) -> None:
        """A store reports what it holds of a generation."""
        report = self.report_of(name, generation)
        if report[3]:
            self.send("held", *report)

    def report_of(self, name: str, generation: Generation) -> tuple[Any, ...]:
        store = self.stores[name]
        assert store is not None
        readable = store.slots.value.holding(generation).values()
        parts = frozenset(
            part
            for slot in readable
            if (generation, slot.source) not in store.dropped
            for part in contents(slot, self.layouts)
        )
        return name, store.incarnation, generation, parts

    # The coordinator.

    def _on_held(self, name: str, incarnation: int, generation: Generation, parts: frozenset[str]) -> None:
        world_size = len(self.layouts[generation.attempt - 1])
        self.rewrite(report_held, name, incarnation, generation, parts, world_size)
        self.settle()

    def _on_abandon(self, generation: Generation) -> None:
        self.rewrite(give_up, generation)
        self.settle()

    def settle(self) -> None:
        """See `Ledger._settle`."""
        free = self.call(Books.releasable, self.books)
        if free:
            self.rewrite(books_.released, free)
            for name, store in self.up().items():
                self.send("release", name, store.incarnation, free)
        for name in self.call(Books.idle, self.books):
            self.stores[name] = None
            self.rewrite(books_.store_lost, name)

    def adopt(self, name: str, attempt: int) -> None:
        """A store answers: it refuses what is of older attempts from now on, and says what it holds."""
        store = self.stores[name]
        assert store is not None
        self.slots(name, slots_.fence, attempt)
        held = self.stores[name]
        assert held is not None
        self.rewrite(books_.store_joined, name, name, held.slots.value.attempt, str(store.incarnation))
        self.heartbeat(name)

    def heartbeat(self, name: str) -> None:
        """A store says everything that it holds. Reports from before, still under way, count no more: see `Held`."""
        store = self.stores[name]
        assert store is not None
        generations = sorted(store.slots.value.generations())
        reports = tuple((g, self.report_of(name, g)[3], len(self.layouts[g.attempt - 1])) for g in generations)
        self.rewrite(state_all, name, store.incarnation, reports)
        self.delayed = {m for m in self.delayed if m[:3] != ("held", name, store.incarnation)}

    def start_store(self, name: str, incarnation: int) -> None:
        slots = self.cells.of(Slots(name, attempt=self.attempt))
        self.stores[name] = Store(incarnation, slots, self.cells.of(Queue()))

    def copy_again(self) -> None:
        """See `Ledger.restore_copies`."""
        if not self.bounds.repairs:
            return
        for copies in self.call(pushes.copies_due, self.books):
            source, target = self.stores[copies.source], self.stores[copies.target]
            if source is not None and target is not None and self.known(copies.source):
                address = f"{copies.target}@{target.incarnation}"
                label = self._fresh_label(copies.source, target, copies.parts)
                attempt = source.slots.value.attempt
                queue = self.call(
                    add_copies, source.queue, copies.generation, copies.parts, attempt, copies.target, address, label
                )
                self.update(copies.source, queue=queue)

    def _fresh_label(self, name: str, target: Store, parts: tuple[str, ...]) -> str:
        source = self.stores[name]
        assert source is not None
        used = {slot.source for slot in target.slots.value.used.values()}
        used |= {job.source for job in source.queue.value.jobs} | {push.label for push in self.pushing}
        number = 0
        while (label := f"{name} again {number} {'.'.join(parts)}") in used:
            number += 1
        return label

    # A store.

    def _on_release(self, name: str, incarnation: int, generations: frozenset[Generation]) -> None:
        store = self.stores[name]
        if store is not None and store.incarnation == incarnation:
            self.update(name, queue=self.call(pushes.forget, store.queue, tuple(sorted(generations))))
            self.slots(name, slots_.release, generations)
            self.tidy(name)

    def tidy(self, name: str) -> None:
        """A store remembers for longer what it was told to forget; it matters while it has to do with it."""
        store = self.stores[name]
        assert store is not None
        self.update(name, queue=self.call(tidied, store.queue, store.slots))

    def _on_join(self, name: str, incarnation: int, group: Group) -> None:
        store = self.stores[name]
        if store is None or store.incarnation != incarnation or store.slots.value.attempt > group.attempt:
            return
        self.slots(name, slots_.fence, group.attempt)
        self.update(name, group=group)

    # Copies.

    def end_push(self, push: Push, ok: bool) -> None:
        """The receiver has everything, or not; the sender's lease ends."""
        target, source = self.stores[push.target], self.stores[push.source]
        if target is not None and target.incarnation == push.target_incarnation:
            key = filling(target.slots.value, push.generation, push.label, push.attempt)
            if key is not None:
                refused = self.slots(push.target, slots_.commit, key, push.attempt) if ok else True
                if refused:
                    self.slots(push.target, slots_.cancel, key)
                else:
                    self.tell(push.target, push.generation)
        source = self.stores[push.source]
        if source is not None and source.incarnation == push.source_incarnation:
            self.slots(push.source, slots_.unlease, push_lease(push))
            self.tidy(push.source)


def outcomes(bounds: Bounds, cells: Cells, world: World, action: Callable[[Draft], bool | None]) -> Iterator[Draft]:
    """Every way in which an action can go; none if it cannot happen now."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        choices = pending.pop()
        draft = Draft(bounds, cells, world, choices)
        if action(draft) is False:
            continue
        yield draft
        for position in range(len(choices), len(draft.options)):
            for other in range(1, draft.options[position]):
                pending.append((*draft.taken[:position], other))


# Functions of values, named so that their results are kept.


def report_held(books: Books, name: str, incarnation: int, generation: Generation, parts: frozenset[str], size: int):
    return books_.held(books, Held(name, generation, size, parts, parts, "", str(incarnation)))


def state_all(books: Books, name: str, incarnation: int, reports: tuple[tuple[Generation, frozenset[str], int], ...]):
    held = tuple(Held(name, g, size, parts, parts, "", str(incarnation)) for g, parts, size in reports)
    return books_.stated(books, Statement(name, str(incarnation), 0, held))


def trimmed(books: Books, mentioned: frozenset[Generation]) -> Books:
    return replace(books, freed=mentioned)


def give_up(books: Books, generation: Generation) -> Books:
    return books_.given_up(books, generation, "")


def add_copies(
    queue: Queue, generation: Generation, parts: tuple[str, ...], attempt: int, target: str, address: str, label: str
) -> Queue:
    job = pushes.PushJob(generation, parts, attempt, target, target=(target, address), source=label)
    return pushes.enqueue(queue, job)


def add_own(queue: Queue, generation: Generation, part: str, rank: int) -> Queue:
    job = pushes.PushJob(generation, (part,), generation.attempt, f"rank {rank}", rank=rank)
    return pushes.enqueue(queue, job)


def tidied(queue: Queue, slots: Slots) -> Queue:
    used = {slot.generation for slot in slots.used.values()} | {job.generation for job in queue.jobs}
    return Queue(queue.jobs, tuple(sorted(g for g in queue.forgotten if g in used)))


def filling(slots: Slots, generation: Generation, source: str, attempt: int) -> int | None:
    """The slot that a writer was granted, whatever has become of it."""
    for key, slot in slots.used.items():
        if (slot.generation, slot.source, slot.attempt) == (generation, source, attempt) and slot.phase in (
            slots_.Phase.FILLING,
            slots_.Phase.STRANDED,
        ):
            return key
    return None


def push_lease(push: Push) -> str:
    return f"push {push.generation} {push.target} {push.label}"


def handle_lease(generation: Generation) -> str:
    return f"handle {generation}"


def describe(message: tuple[Any, ...]) -> str:
    return " ".join(str(sorted(map(str, one)) if isinstance(one, frozenset) else one) for one in message)


__all__ = ["EVERYTHING", "Bounds", "Cell", "Draft", "Rank", "outcomes"]
