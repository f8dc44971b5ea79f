"""The state of a whole run as an immutable value, built from the very values that the running code keeps.

A store is its `Slots` and its `Queue` of pushes; the coordinator is its `Books`; what a buffer really contains follows
from who filled it. `Cells` give every distinct value one object, compared by identity, so that a world is a small tuple
and every transition of the protocol runs once per distinct input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.model.books import Books, Entry, Heard
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.pushes import Queue
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Phase, Slot, Slots

READABLE = (Phase.HELD, Phase.CONDEMNED)


class Rank(NamedTuple):
    """A worker: the last step that it has dealt with, and whether its pipeline waits for a buffer or fills it."""

    step: int
    job: tuple[str, Generation] | None = None


class Group(NamedTuple):
    """What a store knows of the group that it serves: see `messages.Group`. Addresses name store and incarnation."""

    attempt: int = 0
    addresses: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    choice: Generation | None = None


class Store(NamedTuple):
    """A living store."""

    incarnation: int
    slots: Cell
    queue: Cell
    group: Group = Group()
    rotten: frozenset[tuple[Generation, str]] = frozenset()
    dropped: frozenset[tuple[Generation, str]] = frozenset()


class Push(NamedTuple):
    """Bytes on their way: the receiver has given them a buffer, the sender has a lease."""

    source: str
    source_incarnation: int
    target: str
    target_incarnation: int
    generation: Generation
    label: str
    attempt: int


class World(NamedTuple):
    """Everything.

    Attributes:
        layouts: The stores' names (also their domains) by rank, per attempt so far.
        line: Restores within the attempt.
        choice: What the attempt restored.
        ranks: The attempt's workers.
        stores: By position of the name in `Bounds.names`; None: not there.
        books: The coordinator's.
        members_known: Whether the coordinator knows the group.
        pushing: Transfers that are stalled half way.
        delayed: Messages that are still under way.
        faults: How many more may happen.
        skipped: Generations that ranks have skipped since one was complete.
    """

    layouts: tuple[tuple[str, ...], ...]
    line: int
    choice: Generation | None
    ranks: tuple[Rank, ...]
    stores: tuple[Cell | None, ...]
    books: Cell
    members_known: bool
    pushing: frozenset[Push]
    delayed: frozenset[tuple[Any, ...]]
    faults: int
    skipped: frozenset[Generation] = frozenset()

    @property
    def attempt(self) -> int:
        return len(self.layouts)


class Cell:
    """One distinct value; equal values share a cell, so that cells are compared and hashed by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Cells:
    """All distinct values of an exploration, and the results of pure functions on them."""

    def __init__(self) -> None:
        self._cells: dict[Any, Cell] = {}
        self._results: dict[Any, Any] = {}
        self._stores: dict[Store, Cell] = {}

    def of(self, value: Any) -> Cell:
        value = canonical(value)
        key = frozen(value)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(value)
        return cell

    def store(self, store: Store) -> Cell:
        """The cell of a store, whose own values are in cells already."""
        cell = self._stores.get(store)
        if cell is None:
            cell = self._stores[store] = Cell(store)
        return cell

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result; a protocol error is returned, not raised. Cells are unpacked, and results packed."""
        key = (function, *args)
        try:
            return self._results[key]
        except KeyError:
            plain = [arg.value if isinstance(arg, Cell) else arg for arg in args]
            try:
                result = function(*plain)
            except CheckpointError as error:
                result = error
            packed = self._results[key] = self._packed(result)
            return packed

    def _packed(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(self._packed, result))
        return self.of(result) if isinstance(result, Books | Slots | Queue) else result


def canonical(value: Any) -> Any:
    """Slots numbered in a fixed order, without the numbers of earlier ones; books without the wording of reasons."""
    if isinstance(value, Slots):
        used = sorted(value.used.values(), key=lambda s: (s.generation, s.source, s.attempt, s.phase, s.writer))
        return dataclasses.replace(value, used=dict(enumerate(used)), next_id=len(used))
    if isinstance(value, Books):
        heard = {store: Heard(0, 0, _held_by(value, store)) for store in value.heard}
        reasons = dict.fromkeys(value.abandoned, "abandoned")
        entries = {generation: _without_nothing(entry) for generation, entry in value.entries.items()}
        return dataclasses.replace(value, abandoned=reasons, heard=heard, entries=entries)
    return value


def _without_nothing(entry: Entry) -> Entry:
    damaged = {part: stores for part, stores in entry.damaged.items() if stores}
    return dataclasses.replace(entry, damaged=damaged, digests={}, claims={})


def _held_by(books: Books, store: str) -> dict[Generation, frozenset[str]]:
    """What a store has said and the books still have: the rest of it makes no difference."""
    found = {g: frozenset(p for p, at in entry.holders.items() if store in at) for g, entry in books.entries.items()}
    return {generation: parts for generation, parts in found.items() if parts}


def frozen(value: Any) -> Any:
    """A hashable value that is equal for equal ones."""
    kind = type(value)
    if kind in (str, int, bool, frozenset, Generation, Queue):
        return value
    if kind is Slots:
        return (
            value.name,
            value.per_source,
            value.attempt,
            *value.used.values(),
            *sorted(value.leases.items(), key=str),
        )
    if isinstance(value, Mapping):
        return frozenset([(key, frozen(item)) for key, item in value.items()])
    if dataclasses.is_dataclass(value):
        return (kind, *[frozen(getattr(value, name)) for name in fields_of(kind)])
    return value


@cache
def fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def contents(slot: Slot, layouts: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Parts in a slot: its source's own one of the generation, or, copied again, those that the label names."""
    source, again, label = slot.source.partition(" again ")
    if again:
        return tuple(label.split()[1].split("."))
    return (host_part_id(layouts[slot.generation.attempt - 1].index(source)),)


def held_parts(store: Store, layouts: tuple[tuple[str, ...], ...]) -> frozenset[tuple[Generation, str]]:
    """What a store would say that it holds: released buffers that are leased are not in it."""
    return frozenset(
        (slot.generation, part)
        for slot in store.slots.value.used.values()
        if slot.phase is Phase.HELD and (slot.generation, slot.source) not in store.dropped
        for part in contents(slot, layouts)
    )
