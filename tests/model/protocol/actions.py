"""Everything that can happen in a run: what workers, stores and the coordinator do, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from ray_jax_ckpt.errors import StaleAttemptError
from ray_jax_ckpt.model import books as books_
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.books import Books
from ray_jax_ckpt.model.placement import host_part_id, partners
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease, Phase
from tests.model.protocol.draft import Bounds, Draft, add_own, filling, handle_lease, push_lease
from tests.model.protocol.world import Group, Push, Rank, World, contents, held_parts

Action = Callable[[Draft], bool | None]


def enabled(bounds: Bounds, world: World) -> Iterator[tuple[str, Action]]:
    """What can happen, with names for a trace. Some of it turns out to be impossible when it is tried."""
    yield from harmless(bounds, world)
    yield from restarts(bounds, world)
    yield from faults_of_ranks(bounds, world)
    if world.faults:
        yield from faults_of_actors(bounds, world)


def harmless(bounds: Bounds, world: World) -> Iterator[tuple[str, Action]]:
    for message in sorted(world.delayed, key=repr):
        yield f"late: {message}", partial(late, message, False)
        if world.faults:
            yield f"late, and again later: {message}", partial(late, message, True)
    for push in sorted(world.pushing):
        yield f"stalled push arrives: {push}", partial(arrive, push, True)
        yield f"stalled push breaks: {push}", partial(arrive, push, False)
    for rank, worker in enumerate(world.ranks):
        yield f"rank {rank} goes on", partial(go_on, rank)
        if worker.job is None and worker.step < bounds.steps:
            yield f"rank {rank} snapshots step {worker.step + 1}", partial(snapshot, rank)
        for step in bounds.forced:
            yield f"rank {rank} lets go of step {step}", partial(let_go, rank, step)
    for name, store in zip(bounds.names, world.stores, strict=True):
        if store is None:
            yield f"{name}'s death is noticed", partial(notice, name)
            continue
        for lane in sorted({job.lane for job in store.value.queue.value.jobs}):
            yield f"{name} pushes to {lane}", partial(push_next, name, lane)
            yield f"{name} gives up a push to {lane}", partial(give_up_push, name, lane)
        yield f"{name} answers", partial(answer, name)
        yield f"{name}'s former writers end", partial(writers_end, name)
    yield "copies are made up for", make_up
    yield "what ranks have passed is looked for", audit


def restarts(bounds: Bounds, world: World) -> Iterator[tuple[str, Action]]:
    if world.attempt == len(bounds.layouts) or not world.faults:
        return
    for layout in bounds.layouts[world.attempt]:
        yield f"the workers die, {layout} start", partial(restart, layout, None)
        for name in bounds.names if "kill_domain" in bounds.kinds else ():
            yield f"{name} dies whole, {layout} start", partial(restart, layout, name)


def faults_of_ranks(bounds: Bounds, world: World) -> Iterator[tuple[str, Action]]:
    for rank in range(len(world.ranks)):
        if "skip" in bounds.kinds and (world.faults or bounds.skips_freely):
            yield f"rank {rank} skips a step", partial(skip, rank)
        if "fail" in bounds.kinds and world.faults:
            yield f"rank {rank} fails", partial(fail, rank)
    if "rollback" in bounds.kinds and world.faults and world.line == 0:
        yield "all ranks restore an older step", roll_back


def faults_of_actors(bounds: Bounds, world: World) -> Iterator[tuple[str, Action]]:
    for name in bounds.names:
        if "kill_store" in bounds.kinds:
            yield f"store {name} dies", partial(die, name)
        for generation, source in rottable(bounds, world, name) if "rot" in bounds.kinds else ():
            yield f"{name}: bytes of {generation} from {source} rot", partial(rot, name, generation, source)
    if "kill_coordinator" in bounds.kinds:
        yield "the coordinator is killed", kill_coordinator


# Messages.


def late(message: tuple, again: bool, d: Draft) -> None:
    if not again:
        d.delayed.discard(message)
    d.deliver(message)


def answer(name: str, d: Draft) -> bool | None:
    """A heartbeat: a store that the coordinator knows says again what it holds; one that it did not hear of joins."""
    store, books = d.stores[name], d.books
    if d.known(name):
        assert store is not None
        d.heartbeat(name)
        d.settle()
        return d.books is not books or d.stores[name] is not store
    if store is None:
        return False
    before = d.faults
    d.faults = 0
    d.adopt(name, d.books.value.attempt)
    if not d.members_known:
        learn(d)
    if name in d.members and d.members_known:
        join(d)
    d.settle()
    d.faults = before
    return None


def join(d: Draft) -> None:
    """The members learn of each other. Only those that have answered have an address."""
    addresses = tuple(
        f"{name}@{store.incarnation}" if (store := d.stores[name]) is not None and d.known(name) else ""
        for name in d.members
    )
    for name in d.members:
        store = d.stores[name]
        if store is not None and d.known(name):
            d.send("join", name, store.incarnation, Group(d.attempt, addresses, d.members, d.choice))


# Workers.


def snapshot(rank: int, d: Draft) -> bool | None:
    """The training thread hands over a step; the pipeline gets a buffer as soon as there is one."""
    step, job = d.ranks[rank]
    if job is not None or step >= min(r.step for r in d.ranks) + d.bounds.ahead:
        return False
    d.ranks[rank] = Rank(step + 1, ("wait", Generation(d.attempt, d.line, step + 1)))
    go_on(rank, d)
    return None


def go_on(rank: int, d: Draft) -> bool | None:
    """What is next in a rank's pipeline: replace a dead store, get a buffer, fill it and commit."""
    job = d.ranks[rank].job
    name = d.members[rank]
    if job is None:
        return False
    phase, generation = job
    if d.stores[name] is None:
        return replace_store(rank, d)
    if phase == "wait":
        if not get_buffer(rank, generation, d):
            return False
        if d.goes_wrong("stall", f"rank {rank} in step {generation.step}"):
            d.ranks[rank] = d.ranks[rank]._replace(job=("fill", generation))
            return None
    return commit(rank, generation, d)


def writer(attempt: int, rank: int) -> str:
    return f"worker {attempt}.{rank}"


def get_buffer(rank: int, generation: Generation, d: Draft) -> bool:
    name, who = d.members[rank], writer(d.attempt, rank)
    d.slots(name, slots_.writer_starts, who)
    store = d.stores[name]
    assert store is not None
    granted = d.call(granted_to, store.slots, generation, name, d.attempt, who)
    if granted is None or isinstance(granted, Exception):
        return False
    d.stores[name] = store._replace(slots=granted)
    if generation.step in d.bounds.forced:
        d.slots(name, slots_.lease, Lease(handle_lease(generation), generation, d.attempt))
    return True


def granted_to(slots: slots_.Slots, generation: Generation, source: str, attempt: int, who: str):
    slots, key = slots_.grant(slots, generation, source, attempt, who)
    return slots if key is not None else None


def commit(rank: int, generation: Generation, d: Draft) -> bool | None:
    name = d.members[rank]
    store = d.stores[name]
    assert store is not None
    key = filling(store.slots.value, generation, name, d.attempt)
    if key is None:
        # The store that granted the buffer died since.
        d.ranks[rank] = d.ranks[rank]._replace(job=("wait", generation))
        return None
    if d.slots(name, slots_.commit, key, d.attempt):
        return False
    d.ranks[rank] = d.ranks[rank]._replace(job=None)
    d.tell(name, generation)
    store = d.stores[name]
    assert store is not None
    for partner in partners(rank, d.members, d.bounds.copies):
        queue = d.call(add_own, store.queue, generation, host_part_id(rank), partner)
        d.update(name, queue=queue)
    d.tidy(name)
    return None


def replace_store(rank: int, d: Draft) -> bool | None:
    """See `Ledger.replace`."""
    name = d.members[rank]
    if not d.members_known:
        return False
    mourn(name, d)
    d.start_store(name, next_incarnation(d, name))
    d.adopt(name, d.attempt)
    d.settle()
    join(d)
    d.copy_again()
    return None


def next_incarnation(d: Draft, name: str) -> int:
    """Small and other than those that anything still knows."""
    used = {message[2] for message in d.delayed if message[0] in ("held", "release", "join") and message[1] == name}
    used |= {p.source_incarnation for p in d.pushing if p.source == name}
    used |= {p.target_incarnation for p in d.pushing if p.target == name}
    known = {address for store in d.up().values() for address in store.group.addresses}
    known |= {address for m in d.delayed if m[0] == "join" for address in m[3].addresses}
    known |= {job.target[1] for s in d.up().values() for job in s.queue.value.jobs if job.target}
    return next(n for n in range(1, 99) if n not in used and f"{name}@{n}" not in known)


def skip(rank: int, d: Draft) -> bool | None:
    """A step is due while the pipeline is busy."""
    step, job = d.ranks[rank]
    if (
        job is None
        or step >= min(d.bounds.steps, min(r.step for r in d.ranks) + d.bounds.ahead)
        or "skip" not in d.bounds.kinds
        or d.call(Books.must_wait, d.books)
    ):
        return False
    d.faults -= not d.bounds.skips_freely
    generation = Generation(d.attempt, d.line, step + 1)
    d.ranks[rank] = Rank(step + 1, job)
    d.skipped |= {generation}
    d.send("abandon", generation)
    return None


def fail(rank: int, d: Draft) -> bool | None:
    """A pipeline gives a step up: no buffer came in time, or copying failed."""
    job = d.ranks[rank].job
    if job is None:
        return False
    d.faults -= 1
    give_up_step(rank, d)
    return None


def give_up_step(rank: int, d: Draft) -> None:
    job, name = d.ranks[rank].job, d.members[rank]
    assert job is not None
    _, generation = job
    store = d.stores[name]
    if store is not None:
        key = filling(store.slots.value, generation, name, d.attempt)
        if key is not None:
            d.slots(name, slots_.cancel, key)
        d.slots(name, slots_.unlease, handle_lease(generation))
    d.ranks[rank] = d.ranks[rank]._replace(job=None)
    d.send("abandon", generation)


def let_go(rank: int, step: int, d: Draft) -> bool | None:
    """A handle is collected."""
    store = d.stores[d.members[rank]]
    if store is None:
        return False
    for lease in store.slots.value.leases.values():
        if lease.id.startswith("handle") and lease.generation.step == step and lease.attempt == d.attempt:
            d.slots(d.members[rank], slots_.unlease, lease.id)
            d.tidy(d.members[rank])
            return None
    return False


def writers_end(name: str, d: Draft) -> bool | None:
    """Processes of ended attempts are gone at last. Until then one may still write into the buffer it was given."""
    store = d.stores[name]
    assert store is not None
    left = {
        slot.writer
        for slot in store.slots.value.used.values()
        if slot.writer and slot.phase in (Phase.FILLING, Phase.STRANDED) and slot.attempt < d.attempt
    }
    for who in left:
        d.slots(name, slots_.writer_gone, who)
    return bool(left)


# Copies.


def push_next(name: str, lane: str, d: Draft) -> bool | None:
    """The first push of a lane is sent, or found to be pointless."""
    store = d.stores[name]
    assert store is not None
    queue, job = d.call(taken, store.queue, lane)
    if job is None:
        d.update(name, queue=queue)
        return None
    if job.attempt <= d.bounds.slow and d.attempt <= d.bounds.slow:
        return False
    target = aimed(name, job, d)
    if target is None:
        return False
    started = None if target == "" else start_push(name, job, target, d)
    if started is False:
        return False
    store = d.stores[name]
    assert store is not None
    d.update(name, queue=queue)
    if started is not None:
        if d.goes_wrong("stall", f"{started}"):
            d.pushing.add(started)
        else:
            d.end_push(started, True)
    d.tidy(name)
    return None


def taken(queue: pushes.Queue, lane: str):
    return pushes.take(queue, lane)


def aimed(name: str, job: pushes.PushJob, d: Draft) -> str | None:
    """The address that a push goes to; "" if it is pointless; None if it has to wait."""
    store = d.stores[name]
    assert store is not None
    if job.target is not None:
        return job.target[1]
    try:
        return pushes.receiver(job, store.group.attempt or None, dict(enumerate(store.group.addresses))) or None
    except StaleAttemptError:
        return ""
    except pushes.StoreError:
        return None


def start_push(name: str, job: pushes.PushJob, address: str, d: Draft) -> Push | bool | None:
    """The receiver grants a buffer and the sender leases. False: not now; None: it is pointless."""
    to, _, incarnation = address.partition("@")
    target, source = d.stores[to], d.stores[name]
    assert source is not None
    if target is None or target.incarnation != int(incarnation):
        return False
    present = {
        part
        for slot in source.slots.value.holding(job.generation).values()
        if (job.generation, slot.source) not in source.dropped
        for part in contents(slot, d.layouts)
    } & set(job.parts)
    if not present:
        return None
    label = f"{job.source.rsplit(' ', 1)[0]} {'.'.join(sorted(present))}" if job.source else name
    granted = d.call(granted_to, target.slots, job.generation, label, job.attempt, "")
    if isinstance(granted, StaleAttemptError):
        return None
    if granted is None or isinstance(granted, Exception):
        return False
    push = Push(name, source.incarnation, to, target.incarnation, job.generation, label, job.attempt)
    if d.slots(name, slots_.lease, Lease(push_lease(push), job.generation, None)):
        return None
    d.stores[to] = target._replace(slots=granted)
    return push


def give_up_push(name: str, lane: str, d: Draft) -> bool | None:
    """A push has been tried often enough. One that could go on counts as a fault."""
    probe = Draft(d.bounds, d.cells, d.world()._replace(faults=0))
    possible = push_next(name, lane, probe) is not False
    if possible and (not d.faults or "lose_push" not in d.bounds.kinds):
        return False
    if not possible and not d.bounds.repairs:
        # What is given up is made up for, or else it is waited for.
        return False
    d.faults -= possible
    store = d.stores[name]
    assert store is not None
    d.update(name, queue=d.call(taken, store.queue, lane)[0])
    d.tidy(name)
    return None


def arrive(push: Push, ok: bool, d: Draft) -> None:
    d.pushing.discard(push)
    d.end_push(push, ok)


def make_up(d: Draft) -> bool | None:
    """See `Ledger._restore_overdue`: nothing that would bring the copies is under way any more."""
    newest = d.call(pushes.lacking, d.books)
    if newest is None or any(push.generation == newest for push in d.pushing):
        return False
    if any(job.generation == newest for store in d.up().values() for job in store.queue.value.jobs):
        return False
    before = d.world()
    d.copy_again()
    return d.world() != before


# Death.


def refresh_reports(d: Draft, dead: str = "") -> bool:
    """All stores that the coordinator knows say again what they hold; whether all did, but the dead one."""
    for name in d.up():
        if d.known(name):
            d.heartbeat(name)
    return all(d.known(name) for name in d.books.value.domains if name != dead)


def audit(d: Draft) -> bool | None:
    """See `Ledger._audit`."""
    found = d.call(Books.passed, d.books)
    if not found or not refresh_reports(d):
        return False
    for generation in sorted(found & d.call(Books.passed, d.books)):
        d.rewrite(books_.abandoned, generation, "")
    d.settle()
    return None


def mourn(name: str, d: Draft) -> None:
    """See `Ledger._mourn`: what only a dead store held is known for sure when all others have said what they hold."""
    d.rewrite(books_.store_died if refresh_reports(d, name) else books_.store_lost, name)


def notice(name: str, d: Draft) -> bool | None:
    """See `Ledger._dead`."""
    if name not in d.books.value.domains.keys() | d.books.value.silent.keys():
        return False
    mourn(name, d)
    d.copy_again()
    d.settle()
    return None


def die(name: str, d: Draft) -> bool | None:
    if d.stores[name] is None:
        return False
    d.faults -= 1
    d.stores[name] = None
    return None


def kill_coordinator(d: Draft) -> None:
    """It starts again at once and asks the stores; what was on its way to it is lost."""
    d.faults -= 1
    d.delayed = {message for message in d.delayed if message[0] not in ("held", "abandon")}
    d.books = d.cells.of(type(d.books.value)(d.bounds.copies))
    d.members_known = False
    for name in d.up():
        if d.goes_wrong("silence", name):
            d.rewrite(books_.store_silent, name)
        else:
            d.adopt(name, 0)
    learn(d)
    d.settle()


def learn(d: Draft) -> None:
    """See `Ledger.learn`."""
    groups = [store.group for name, store in d.up().items() if d.known(name)]
    newest = max(groups, key=lambda group: group.attempt, default=Group())
    if d.bounds.learns and newest.attempt == d.books.value.attempt and newest.members:
        d.members_known = True
        d.rewrite(books_.group_learned, newest.attempt, newest.members, newest.choice)
        for name in newest.members:
            if d.known(name):
                d.slots(name, slots_.fence, newest.attempt)
        join(d)


def rottable(bounds: Bounds, world: World, name: str) -> list[tuple[Generation, str]]:
    cell = world.stores[bounds.names.index(name)]
    if cell is None:
        return []
    store = cell.value
    held = {(s.generation, s.source) for s in store.slots.value.used.values() if s.phase is Phase.HELD}
    return sorted(held - store.rotten - store.dropped)


def rot(name: str, generation: Generation, source: str, d: Draft) -> None:
    store = d.stores[name]
    assert store is not None
    d.faults -= 1
    d.update(name, rotten=store.rotten | {(generation, source)})


# Attempts.


def restart(layout: tuple[str, ...], lost: str | None, d: Draft) -> bool | None:
    """The workers are gone, one node perhaps with them, and a new group starts: see `Coordinator.begin_attempt`."""
    d.faults -= 1
    if lost is not None:
        if d.stores[lost] is None:
            return False
        d.stores[lost] = None
    attempt = d.attempt + 1
    if not ask_stores(attempt, d):
        return False
    d.layouts, d.line, d.skipped = (*d.layouts, layout), 0, frozenset()
    d.choice = choose(attempt, d)
    d.rewrite(books_.group_forming, attempt, layout)
    d.members_known = True
    d.settle()
    form_group(attempt, d)
    d.ranks = [Rank(0 if d.choice is None else d.choice.step) for _ in layout]
    return None


def ask_stores(attempt: int, d: Draft) -> bool:
    """See `Ledger.refresh`. False: stores that live and are silent cannot be done without."""
    silent = [name for name in d.up() if d.goes_wrong("silence", name)]
    dead = [name for name in d.books.value.domains if d.stores[name] is None]
    replaced = [name for name in d.books.value.domains if d.stores[name] is not None and not d.known(name)]
    if any(not d.known(name) for name in silent):
        return False
    if not d.call(does_without, d.books, tuple(silent), (*dead, *replaced)):
        return False
    for name in d.up():
        if name not in silent:
            d.adopt(name, attempt)
    for name in silent:
        d.rewrite(books_.store_silent, name)
    for name in dead:
        d.rewrite(books_.store_died, name)
    return True


def form_group(attempt: int, d: Draft) -> None:
    """See `Ledger.form_group`."""
    for name in d.members:
        if d.stores[name] is None:
            d.start_store(name, next_incarnation(d, name))
            d.adopt(name, attempt)
    join(d)
    d.rewrite(books_.group_formed, attempt, d.members)
    d.settle()
    newest = d.call(Books.newest, d.books)
    if newest is not None and newest.attempt < attempt:
        d.copy_again()


def does_without(books: Books, silent: tuple[str, ...], dead: tuple[str, ...]) -> bool:
    return books.does_without(silent, dead)


def choose(attempt: int, d: Draft) -> Generation | None:
    """See `Ledger.choose`: what is chosen is digested again first."""
    while True:
        books, choice = d.call(attempt_started, d.books, attempt)
        if choice is None or not strike_out_rotten(choice, d):
            d.books = books
            return choice


def attempt_started(books: Books, attempt: int):
    return books_.attempt_started(books, attempt)


def strike_out_rotten(generation: Generation, d: Draft) -> bool:
    found = False
    for name, store in d.up().items():
        bad = {(g, source) for g, source in store.rotten if g == generation}
        if bad and d.known(name):
            kept = store._replace(dropped=store.dropped | bad, rotten=store.rotten - bad)
            d.stores[name] = kept
            gone = {part for g, part in held_parts(store, d.layouts) - held_parts(kept, d.layouts) if g == generation}
            d.rewrite(books_.dropped, name, generation, tuple(sorted(gone)))
            found = True
    return found


def roll_back(d: Draft) -> bool | None:
    """All ranks restore an older step together, which they still hold, and go on from there in a new line."""
    complete = d.call(Books.complete, d.books)
    if any(rank.job or rank.step != d.ranks[0].step for rank in d.ranks) or not complete or d.ranks[0].step < 2:
        return False
    d.faults -= 1
    d.line += 1
    d.ranks = [Rank(complete[-1].step - 1) for _ in d.ranks]
    return None


__all__ = ["Action", "enabled", "harmless", "product"]
