"""Which copies stores make, in which order, and which they pass over: pure decisions on plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ray_jax_ckpt.errors import StaleAttemptError, StoreError
from ray_jax_ckpt.model.books import Books
from ray_jax_ckpt.model.index import PartLayout
from ray_jax_ckpt.model.recovery import choose_push
from ray_jax_ckpt.model.shards import Generation

# More than a store can have in its queues at a time.
MAX_FORGOTTEN = 64


@dataclass(frozen=True)
class PushJob:
    """Parts of a generation to be copied to a peer.

    Attributes:
        generation: Which.
        parts: Their ids.
        attempt: On whose behalf.
        lane: Jobs of one lane run one after the other, in the order they came. One lane per receiver.
        rank: The receiver's rank in the attempt's group, when name and address are to be looked up when it is sent.
        target: The receiver's name and Flight address otherwise.
        source: What the receiver knows the sender as; "" for its name.
    """

    generation: Generation
    parts: tuple[str, ...]
    attempt: int
    lane: str
    rank: int | None = None
    target: tuple[str, str] | None = None
    source: str = ""


@dataclass(frozen=True)
class Queue:
    """What a store has to push.

    Attributes:
        jobs: In the order they came.
        forgotten: Generations that have been released: their jobs are passed over. The newest few.
    """

    jobs: tuple[PushJob, ...] = ()
    forgotten: tuple[Generation, ...] = ()


def enqueue(queue: Queue, job: PushJob) -> Queue:
    """Adds a job at the end of its lane."""
    return replace(queue, jobs=(*queue.jobs, job))


def forget(queue: Queue, generations: Iterable[Generation]) -> Queue:
    """These are abandoned or replaced: nobody needs more copies of them."""
    known = dict.fromkeys((*queue.forgotten, *generations))
    return replace(queue, forgotten=tuple(known)[-MAX_FORGOTTEN:])


def take(queue: Queue, lane: str) -> tuple[Queue, PushJob | None]:
    """The lane's next job, without those before it that are passed over; None if there is none.

    In order: with few buffers a peer that got a newer one first has no room for the older one, and if some peers got
    this and others that, none of the two ever gets all its copies.
    """
    waiting = [job for job in queue.jobs if job.lane == lane]
    job = next((job for job in waiting if job.generation not in queue.forgotten), None)
    done = waiting if job is None else waiting[: waiting.index(job) + 1]
    return replace(queue, jobs=tuple(other for other in queue.jobs if not any(other is one for one in done))), job


def own_jobs(generation: Generation, parts: Iterable[PartLayout]) -> list[PushJob]:
    """What a store sends on when its worker has committed these parts: one job per receiving rank."""
    by_rank: dict[int, list[str]] = {}
    for part in parts:
        for rank in part.targets if part.pushed else ():
            by_rank.setdefault(rank, []).append(part.id)
    return [
        PushJob(generation, tuple(ids), generation.attempt, f"rank {rank}", rank=rank) for rank, ids in by_rank.items()
    ]


def receiver(job: PushJob, attempt: int | None, addresses: Mapping[int, str]) -> str:
    """Address of the rank's store that a job goes to, in the group that the sending store was told of.

    Raises:
        StaleAttemptError: The job's attempt has been replaced.
        StoreError: The group of the job's attempt is not known (yet), or has no such rank.
    """
    if attempt is None or attempt < job.attempt:
        raise StoreError(f"The peers of attempt {job.attempt} are not known.")
    if attempt > job.attempt:
        raise StaleAttemptError(f"Attempt {job.attempt} has been replaced by {attempt}.")
    address = addresses.get(-1 if job.rank is None else job.rank)
    if address is None:
        raise StoreError(f"Rank {job.rank} has no store in attempt {job.attempt}.")
    return address


@dataclass(frozen=True)
class Copies:
    """Parts of a generation that one store is to copy to another."""

    generation: Generation
    source: str
    target: str
    parts: tuple[str, ...]


def lacking(books: Books) -> Generation | None:
    """The newest complete generation, if it has fewer copies than there should be."""
    newest = books.newest()
    return newest if newest is not None and books.undercovered(newest) else None


def copies_due(books: Books) -> list[Copies]:
    """What brings the newest complete generation back to its copies. Older ones wait for it to replace them."""
    newest = lacking(books)
    if newest is None:
        return []
    return _copies(books, newest, books.undercovered(newest))


def repairs_due(books: Books, generation: Generation) -> list[Copies]:
    """What makes up for copies of a generation that were found bad. Only that: other copies may be on their way."""
    entry = books.entries.get(generation)
    if entry is None or generation in books.abandoned:
        return []
    lacking = books.undercovered(generation)
    return _copies(books, generation, {part: stores for part, stores in lacking.items() if entry.damaged.get(part)})


def _copies(books: Books, generation: Generation, parts: Mapping[str, frozenset[str]]) -> list[Copies]:
    damaged, lasting = books.entries[generation].damaged, books.lasting()
    jobs: dict[tuple[bool, str, str, str], list[str]] = {}
    for part, source, target in choose_push(parts, lasting, books.receivers(), books.wanted(), damaged):
        # A bad copy is overwritten in its place, so its part travels alone.
        alone = part if target in damaged.get(part, ()) else ""
        jobs.setdefault((bool(parts[part] & lasting.keys()), source, target, alone), []).append(part)
    # First what only draining stores hold: there may not be time for everything.
    return [Copies(generation, source, target, tuple(ids)) for (_, source, target, _), ids in sorted(jobs.items())]
