"""The rest of a run in which nothing more goes wrong: it must end with its last step protected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ray_jax_ckpt.model.books import Status
from ray_jax_ckpt.model.shards import Generation
from tests.model.protocol import actions
from tests.model.protocol.actions import Action
from tests.model.protocol.draft import Bounds, Draft
from tests.model.protocol.world import Cells, World, held_parts

MAX_STEPS = 400


def complete_run(bounds: Bounds, cells: Cells, world: World, lives: set[World]) -> tuple[list[str], str]:
    """Lets everybody go on, and every rank take one step more than it would.

    Args:
        bounds: Of the exploration.
        cells: Its values.
        world: From here.
        lives: Worlds known to end well; those on this way are added.

    Returns:
        What happened, and what is wrong at its end ("" if nothing is).
    """
    last, bounds = bounds.steps + 1, replace(bounds, slow=0)
    world, path, way = world._replace(faults=0), [], []
    while world not in lives:
        if protected(bounds, world, last) or forgotten(world):
            break
        path.append(world)
        found = next_step(bounds, cells, world, last)
        if found is None or len(path) > MAX_STEPS:
            return way, f"the last step never becomes protected ({'stuck' if found is None else 'for ever'})"
        label, world = found
        way.append(label)
    lives.update(path)
    return way, ""


def protected(bounds: Bounds, world: World, last: int) -> bool:
    """By the books, and by what the stores hold."""
    books, generation = world.books.value, Generation(world.attempt, world.line, last)
    if generation not in books.entries or books.status(generation) is not Status.PROTECTED:
        return False
    holders = [{part for g, part in held_parts(s.value, world.layouts) if g == generation} for s in world.stores if s]
    size, wanted = len(world.layouts[-1]), min(bounds.copies, len(world.layouts[-1]))
    return all(sum(f"h{rank}" in parts for parts in holders) >= wanted for rank in range(size))


def forgotten(world: World) -> bool:
    """Every store died, and the coordinator too: nobody knows the group any more, and only its next attempt goes on."""
    return not world.members_known and not any(world.stores)


def next_step(bounds: Bounds, cells: Cells, world: World, last: int) -> tuple[str, World] | None:
    """The first thing that can happen, in an order in which nobody is left behind."""
    for label, action in in_order(bounds, world, last):
        draft = Draft(bounds, cells, world)
        if action(draft) is not False and (after := draft.world()) != world:
            return label, after
    return None


def in_order(bounds: Bounds, world: World, last: int) -> Iterator[tuple[str, Action]]:
    for message in sorted(world.delayed, key=repr):
        yield f"late: {message}", partial(actions.late, message, False)
    for push in sorted(world.pushing):
        yield f"stalled push arrives: {push}", partial(actions.arrive, push, True)
    for name, cell in zip(bounds.names, world.stores, strict=True):
        if cell is None:
            yield f"{name}'s death is noticed", partial(actions.notice, name)
        else:
            yield f"{name} answers", partial(actions.answer, name)
            yield f"{name}'s former writers end", partial(actions.writers_end, name)
    yield "what ranks have passed is looked for", actions.audit
    for name, lane in lanes(bounds, world):
        yield f"{name} pushes to {lane}", partial(actions.push_next, name, lane)
    yield from ranks_go_on(world, last)
    for name, lane in lanes(bounds, world):
        yield f"{name} gives up a push to {lane}", partial(actions.give_up_push, name, lane)
    for rank in range(len(world.ranks)):
        for step in () if bounds.keeps else sorted(bounds.forced):
            yield f"rank {rank} lets go of step {step}", partial(actions.let_go, rank, step)
    for rank in range(len(world.ranks)):
        yield f"rank {rank} waits no longer", partial(give_up_waiting, rank, last)


def lanes(bounds: Bounds, world: World) -> list[tuple[str, str]]:
    stores = [(name, cell.value) for name, cell in zip(bounds.names, world.stores, strict=True) if cell]
    return [(name, lane) for name, store in stores for lane in sorted({job.lane for job in store.queue.value.jobs})]


def ranks_go_on(world: World, last: int) -> Iterator[tuple[str, Action]]:
    behind = sorted(range(len(world.ranks)), key=lambda rank: (world.ranks[rank].step, rank))
    for rank in behind:
        yield f"rank {rank} goes on", partial(actions.go_on, rank)
    yield "copies are made up for", actions.make_up
    for rank in behind:
        if world.ranks[rank].step < last:
            yield f"rank {rank} snapshots step {world.ranks[rank].step + 1}", partial(actions.snapshot, rank)


def give_up_waiting(rank: int, last: int, d: Draft) -> bool | None:
    """A wait for a buffer is bounded; that for the last step's is what must end well."""
    job = d.ranks[rank].job
    if job is None or job[1].step >= last:
        return False
    actions.give_up_step(rank, d)
    return None
