"""Breadth-first exploration of every run within bounds, with the way to what is wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from ray_jax_ckpt.model.books import Books, Status
from ray_jax_ckpt.model.pushes import Queue
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Slots
from tests.model.protocol import actions
from tests.model.protocol.completion import complete_run
from tests.model.protocol.draft import Bounds, Draft, outcomes
from tests.model.protocol.invariants import Invariants
from tests.model.protocol.world import Cells, Rank, Store, World


class Broken(AssertionError):
    """Something must not happen, and does: with the shortest way there."""


@dataclass
class Explored:
    """What an exploration has been through."""

    states: int = 0
    steps: int = 0
    completions: int = 0
    decisions: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.states} states, {self.steps} steps, {self.completions} states on the way to their ends"


@dataclass
class Explorer:
    """Explores from the start of the first attempt. `limit` bounds the number of states, for finding out."""

    bounds: Bounds
    limit: int = 10**9
    cells: Cells = field(default_factory=Cells)

    def __post_init__(self) -> None:
        self.invariants = Invariants(self.bounds)
        self.found = Explored()
        self._came_from: dict[World, tuple[World | None, str]] = {}
        self._lives: set[World] = set()

    def start(self) -> World:
        """The first attempt's group, with empty stores."""
        layout = self.bounds.layouts[0][0]
        books = self.cells.of(Books(self.bounds.copies))
        empty = self.cells.of(Queue())
        stores = tuple(
            self.cells.store(Store(0, self.cells.of(Slots(name)), empty)) if name in layout else None
            for name in self.bounds.names
        )
        nobody = World((layout,), 0, None, (), stores, books, True, frozenset(), frozenset(), 0)
        draft = Draft(self.bounds, self.cells, nobody._replace(layouts=()))
        for name in layout:
            draft.adopt(name, 0)
        draft.faults, draft.bounds = 1, replace(self.bounds, kinds=frozenset())
        actions.restart(layout, None, draft)
        return draft.world()._replace(faults=self.bounds.faults, ranks=tuple(Rank(0) for _ in layout))

    def run(self) -> Explored:
        """Raises Broken at the first state or step that is wrong."""
        start = self.start()
        self._came_from[start] = (None, "start")
        waiting = deque([start])
        while waiting:
            world = waiting.popleft()
            self._completes(world)
            for label, after in self._steps(world):
                self.found.steps += 1
                problem = next(self.invariants.broken(world, after, label), None)
                if problem:
                    raise Broken(self._tell(world, label, after, problem))
                if after not in self._came_from:
                    self._came_from[after] = (world, label)
                    waiting.append(after)
            if len(self._came_from) > self.limit:
                raise RuntimeError(f"more than {self.limit} states")
        self.found.states = len(self._came_from)
        return self.found

    def _steps(self, world: World):
        for label, action in actions.enabled(self.bounds, world):
            for draft in outcomes(self.bounds, self.cells, world, action):
                after = draft.world()
                if after != world:
                    yield (f"{label} [{'; '.join(draft.notes)}]" if draft.notes else label), after

    def _completes(self, world: World) -> None:
        """Without more faults, the last step can still become protected."""
        way, problem = complete_run(self.bounds, self.cells, world, self._lives)
        if problem:
            raise Broken(self._tell(world, "", None, f"liveness: {problem}", way))
        self.found.completions += len(way)

    def _tell(self, world: World, label: str, after: World | None, problem: str, way: list[str] | None = None) -> str:
        steps = [label] if label else []
        at: World | None = world
        while at is not None:
            at, how = self._came_from[at]
            steps.append(how)
        lines = [f"  {number:2} {step}" for number, step in enumerate(reversed(steps))]
        lines += [f"   > {step}" for step in way or ()]
        return "\n".join([problem, *lines, picture(self.bounds, after or world)])


def picture(bounds: Bounds, world: World) -> str:
    """A world in lines."""
    lines = [f"attempt {world.attempt} of {world.layouts[-1]}, restored {world.choice}, {world.ranks}"]
    for name, cell in zip(bounds.names, world.stores, strict=True):
        if cell is None:
            lines.append(f"{name}: dead")
            continue
        store = cell.value
        slots = store.slots.value
        used = [f"{s.generation}<{s.source} {s.phase} ({s.attempt})" for s in slots.used.values()]
        leases = [f"{lease.id}" for lease in slots.leases.values()]
        jobs = [f"{job.generation}>{job.lane}" for job in store.queue.value.jobs]
        forgotten = [str(g) for g in store.queue.value.forgotten]
        lines.append(
            f"{name}@{store.incarnation}: attempt {slots.attempt} {used} leases {leases} to push {jobs} forgotten "
            f"{forgotten} group {store.group.attempt}{store.group.addresses}"
        )
    books = world.books.value
    lines.append(f"books: attempt {books.attempt} domains {dict(books.incarnations)} group {sorted(books.group)}")
    for generation, entry in sorted(books.entries.items()):
        holders = {part: "".join(sorted(stores)) for part, stores in entry.holders.items()}
        lines.append(f"  {generation} {books.status(generation)} {holders}")
    lines.append(f"  abandoned {[str(g) for g in books.abandoned]} decided {books.decided}")
    lines += [f"late: {message}" for message in world.delayed] + [f"stalled: {push}" for push in world.pushing]
    return "\n".join(lines)


__all__ = ["Broken", "Explored", "Explorer", "Generation", "Status", "picture"]
