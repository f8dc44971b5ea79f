"""What must be true of every state and every step of a run, by what stores really hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ray_jax_ckpt.errors import StaleAttemptError, StoreError
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease, Phase, Slots
from tests.model.protocol.draft import Bounds
from tests.model.protocol.world import READABLE, Cell, Store, World, contents, held_parts

NOTHING = Generation(0, 0, 0)


def age(generation: Generation) -> tuple[int, int, int]:
    """Its place in time, whatever the rules under test make of it."""
    return generation.attempt, generation.restores, generation.step


class Invariants:
    """The checks of one exploration."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._held = cache(lambda cell, layouts: held_parts(cell.value, layouts))
        self._readable = cache(readable)
        self._fenced = cache(fenced)
        self._known: dict[tuple, Generation] = {}

    def broken(self, before: World, after: World, label: str) -> Iterator[str]:
        """What a step breaks, in words."""
        if "dies whole" in label:
            position = self.bounds.names.index(label.split()[0])
            before = before._replace(stores=tuple(None if i == position else s for i, s in enumerate(before.stores)))
        if after.attempt > before.attempt:
            yield from self._decided(before, after)
            yield from self._kept(before, after, True)
        elif not label.startswith("store ") and not label.endswith(" rot"):
            yield from self._kept(before, after, False)
            yield from self._restorable(before, after)
        if "former writers end" not in label:
            yield from self._not_passed_on(before, after)
        yield from self._leased(before, after)
        old, new = before.books.value, after.books.value
        if self._outdated(before, label) and (old.entries, old.abandoned) != (new.entries, new.abandoned):
            yield "I7: a message of an ended attempt, or of a dead store, changed the books"
        if " skips " in label:
            yield from self._skipped(after)
        for store in after.stores:
            yield from self._fenced(store.value.slots) if store else ()

    @staticmethod
    def _outdated(world: World, label: str) -> bool:
        """Whether a message that is late comes from somebody who counts no more."""
        for kind, *content in (m for m in world.delayed if label.startswith("late") and label.endswith(f": {m}")):
            if kind == "abandon":
                return content[0].attempt < world.attempt
            if kind == "held":
                return world.books.value.incarnations.get(content[0]) != str(content[1])
        return False

    def newest(self, world: World, without: str | None, judged: World, known_only: bool = False) -> Generation:
        """The newest generation that could be restored, by what the stores hold, if a domain were lost as well.

        Not those that `judged`'s coordinator has abandoned, nor those that its attempt was too late for, nor those that
        are being freed, since a newer one covers them.
        """
        books = world.books if known_only else None
        freed = frozenset(g for message in judged.delayed if message[0] == "release" for g in message[3])
        key = (world.stores, world.layouts, books, without, judged.books, judged.choice, judged.attempt, freed)
        if key not in self._known:
            parts = self._parts(world, without, known_only)
            usable = (g for g in self._usable(parts, world, judged) if g not in freed)
            self._known[key] = max(usable, default=NOTHING, key=age)
        return self._known[key]

    def _parts(self, world: World, without: str | None, known_only: bool) -> dict[Generation, set[str]]:
        parts: dict[Generation, set[str]] = {}
        books = world.books.value
        for name, cell in zip(self.bounds.names, world.stores, strict=True):
            if cell is None or name == without:
                continue
            if known_only and books.incarnations.get(name) != str(cell.value.incarnation):
                continue
            for generation, part in self._held(cell, world.layouts):
                entry = books.entries.get(generation)
                if not known_only or (entry is not None and name in entry.holders.get(part, ())):
                    parts.setdefault(generation, set()).add(part)
        return parts

    @staticmethod
    def _usable(parts: dict[Generation, set[str]], world: World, judged: World) -> Iterator[Generation]:
        floor = judged.choice or NOTHING
        for generation, found in parts.items():
            whole = len(found) == len(world.layouts[generation.attempt - 1])
            timely = generation.attempt == judged.attempt or age(generation) <= age(floor)
            if whole and timely and generation not in judged.books.value.abandoned:
                yield generation

    def _decided(self, before: World, after: World) -> Iterator[str]:
        """I2: one decision, which can be served, and is the newest one that the stores which answer can serve."""
        truth = self.newest(after, None, before, known_only=True)
        choice = after.choice or NOTHING
        if choice != truth:
            yield f"I2: {choice} was chosen, the newest complete one in the stores that answer is {truth}"
        promised = self.newest(before, None, before, known_only=True)
        if age(choice) < age(promised) and not any(cell and cell.value.rotten for cell in before.stores):
            yield f"I2: {choice} was chosen without waiting for stores that hold {promised}"

    def _kept(self, before: World, after: World, restarted: bool) -> Iterator[str]:
        """I1: whatever domain is lost next, what can be restored then is not older than it was before."""
        if restarted and any(cell and cell.value.rotten for cell in before.stores):
            return
        losses = [None, *(self.bounds.names if after.books.value.wanted() > 1 else ())]
        for loss in losses:
            # Copies that the coordinator has not heard of yet are nobody's promise when others are lost.
            was = self.newest(before, loss, before, known_only=loss is not None or self._unnoticed(before))
            now = self.newest(after, loss, after)
            if restarted:
                was = min(was, after.choice or NOTHING, key=age)
            if age(now) < age(was):
                yield f"I1: after the loss of {loss or 'nothing'} {now} could be restored, before this step {was}"

    def _unnoticed(self, world: World) -> bool:
        """Whether a store is dead that the coordinator takes to be alive."""
        alive = {n: str(c.value.incarnation) for n, c in zip(self.bounds.names, world.stores, strict=True) if c}
        return not world.books.value.incarnations.items() <= alive.items()

    def _restorable(self, before: World, after: World) -> Iterator[str]:
        """I2: what an attempt restores stays where it is until every rank has restored it and gone on."""
        choice = after.choice
        if choice is None or after.line or not any(r.job is None and r.step == choice.step for r in after.ranks):
            return
        found = [self._readable(cell, choice, before.layouts) for cell in before.stores if cell]
        if len(set().union(*found)) < len(before.layouts[choice.attempt - 1]):
            return
        for name, old, new in zip(self.bounds.names, before.stores, after.stores, strict=True):
            if old is new or old is None:
                continue
            left = self._readable(new, choice, after.layouts) if new else set()
            if not self._readable(old, choice, before.layouts) <= left:
                yield f"I2: {name} freed a copy of {choice} while a rank may be reading it"

    def _not_passed_on(self, before: World, after: World) -> Iterator[str]:
        """I7: a buffer that a living writer of an ended attempt may be filling is not given to anybody else."""
        for name, old, new in zip(self.bounds.names, before.stores, after.stores, strict=True):
            if old is None or new is None or old.value.slots is new.value.slots:
                continue
            for slot in old.value.slots.value.used.values():
                if not slot.writer or slot.attempt >= after.attempt or slot.phase in READABLE:
                    continue
                left = [
                    (s.generation, s.source, s.attempt, s.phase in READABLE)
                    for s in new.value.slots.value.used.values()
                ]
                if (slot.generation, slot.source, slot.attempt, False) not in left:
                    yield f"I7: {name} passed on the buffer of {slot.generation}, whose writer may live"

    def _leased(self, before: World, after: World) -> Iterator[str]:
        """What somebody has a lease on stays readable."""
        for name, old, new in zip(self.bounds.names, before.stores, after.stores, strict=True):
            if old is None or new is None or old is new or old.value.incarnation != new.value.incarnation:
                continue
            for key in old.value.slots.value.leases.keys() & new.value.slots.value.leases.keys():
                generation = old.value.slots.value.leases[key].generation
                left = self._readable(new, generation, after.layouts)
                if not self._readable(old, generation, before.layouts) <= left and not new.value.dropped:
                    yield f"lease: {name} freed {generation}, on which there is the lease {key}"

    def _skipped(self, after: World) -> Iterator[str]:
        """I4: ranks that skip in turns do not starve the run."""
        newest = self.newest(after, None, after)
        since = [generation for generation in after.skipped if age(generation) > age(newest)]
        if len(since) > 1 and not self.bounds.kinds & {"delay", "kill_coordinator"}:
            yield f"I4: ranks skipped {sorted(map(str, since))} in turns, and none since {newest} is complete"


def readable(cell: Cell, generation: Generation, layouts: tuple[tuple[str, ...], ...]) -> set[str]:
    store: Store = cell.value
    return {
        part
        for slot in store.slots.value.holding(generation).values()
        if (generation, slot.source) not in store.dropped
        for part in contents(slot, layouts)
    }


def fenced(cell: Cell) -> tuple[str, ...]:
    """I7: a store that has seen an attempt takes nothing of an older one; no source has more buffers than its due."""
    slots: Slots = cell.value
    sources = {slot.source for slot in slots.used.values()}
    found = [f"memory: {slots.name}, {one}" for one in sources if len(slots.of_source(one)) > slots.per_source + 1]
    if any(lease.attempt is not None and lease.attempt < slots.attempt for lease in slots.leases.values()):
        found.append(f"I7: {slots.name} has a lease of an ended attempt")
    for old in range(1, slots.attempt):
        found += [f"I7: {slots.name} {what} to attempt {old}" for what in lets(slots, old)]
    return tuple(found)


def lets(slots: Slots, old: int) -> Iterator[str]:
    """What a store concedes to an attempt that has been replaced."""
    generation = Generation(old, 9, 9)
    tries = {
        "grants": lambda: slots_.grant(slots, generation, "zombie", old, "worker"),
        "leases": lambda: slots_.lease(slots, Lease("zombie", generation, old)),
    }
    for key, slot in slots.used.items():
        if slot.attempt == old and slot.phase not in READABLE:
            tries[f"lets commit {slot.generation}"] = lambda key=key: slots_.commit(slots, key, old)
        if slot.attempt == old and slot.phase is Phase.FILLING:
            yield f"leaves {slot.generation}"
    for what, attempt in tries.items():
        try:
            attempt()
        except StaleAttemptError:
            continue
        except StoreError as error:
            yield f"{what} but for {error!r}"
        else:
            yield what
