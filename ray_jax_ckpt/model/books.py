"""The group's books: which living store holds which part of which generation, and what follows from that.

Values are immutable and every transition is a pure function from books to books, so that the running coordinator and an
exhaustive exploration use the same rules. What can be *restored* follows from the stores' own inventories alone: a
coordinator that lost its memory rebuilds these books by asking them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ray_jax_ckpt.model.entries import NOWHERE, Entry, Heard, Held, Silent, Statement, Status
from ray_jax_ckpt.model.shards import Generation

# Older ones are older than everything that anybody still talks about.
MAX_FREED = 64

__all__ = ["Books", "Entry", "Heard", "Held", "Silent", "Statement", "Status"]


@dataclass(frozen=True)
class Books:
    """All generations that some living store holds something of.

    Attributes:
        copies: Copies wanted.
        attempt: The current attempt. Reports of generations of a later one are refused, of earlier ones accepted as
            inventory.
        domains: Failure domain of every living store.
        group: Stores of the current worker group. Others live on until what they hold has been replaced.
        draining: Stores whose nodes will be taken away. They serve what they hold as long as they live, but what only
            they hold is as good as lost: it is copied elsewhere, and they get nothing new.
        entries: By generation.
        decided: The attempt that chose last what to restore, and its choice.
        incarnations: Which of the stores that have had a name is the living one.
        heard: What each living store has said.
        freed: Generations that stores were told to free, the newest of them. What is still said of them counts no more:
            it may have been on its way, and what it tells of be gone.
        lingering: Those of them that a store has named since: it is told again.
        abandoned: Generations that can never be restored, and why; forgotten once a newer one is complete.
        reject_differing: Whether a generation is abandoned when ranks captured replicas that differ. Else what the
            lowest rank captured counts, and the others are as good as damaged.
        silent: Stores that live and do not answer, and what they held when they did. Nothing is restored from them; but
            they may answer again when another one is lost, so nothing is freed for which they would be needed then.
    """

    copies: int
    attempt: int = 0
    domains: Mapping[str, str] = field(default_factory=dict)
    group: frozenset[str] = NOWHERE
    draining: frozenset[str] = NOWHERE
    entries: Mapping[Generation, Entry] = field(default_factory=dict)
    decided: tuple[int, Generation | None] | None = None
    abandoned: Mapping[Generation, str] = field(default_factory=dict)
    incarnations: Mapping[str, str] = field(default_factory=dict)
    heard: Mapping[str, Heard] = field(default_factory=dict)
    freed: frozenset[Generation] = frozenset()
    lingering: frozenset[Generation] = frozenset()
    reject_differing: bool = False
    silent: Mapping[str, Silent] = field(default_factory=dict)

    # What follows from them.

    def covered(self, generation: Generation) -> list[frozenset[str]]:
        """The living failure domains that hold a copy, part by part, be it on a draining store."""
        return self._spread(generation, self.domains)

    def leaving(self) -> frozenset[str]:
        """Draining stores, unless there are no others: then nothing can be done and they count like any store."""
        return self.draining if self._served().keys() - self.draining else NOWHERE

    def lasting(self) -> dict[str, str]:
        """Living stores that are not leaving, with their domains."""
        leaving = self.leaving()
        return {name: domain for name, domain in self.domains.items() if name not in leaving}

    def spread(self, generation: Generation) -> list[frozenset[str]]:
        """The failure domains that hold a copy which lasts, part by part."""
        return self._spread(generation, self.lasting())

    def receivers(self) -> dict[str, str]:
        """Stores that new copies may go to, with their domains: the group's, or all while no group is known."""
        leaving = self.leaving()
        return {name: domain for name, domain in self._served().items() if name not in leaving}

    def wanted(self) -> int:
        """Distinct domains that a protected generation is in."""
        return min(self.copies, len(set(self.receivers().values())))

    def _served(self) -> dict[str, str]:
        return {name: domain for name, domain in self.domains.items() if name in self.group} or dict(self.domains)

    def _spread(self, generation: Generation, stores: Mapping[str, str]) -> list[frozenset[str]]:
        entry = self.entries[generation]
        return [
            frozenset(stores[store] for store in entry.holders.get(part, NOWHERE) if store in stores)
            for part in entry.expected()
        ]

    def idle(self) -> list[str]:
        """Stores outside the group that hold nothing of anything: they may end."""
        busy = {store for entry in self.entries.values() for stores in entry.holders.values() for store in stores}
        return sorted(self.domains.keys() - self.group - busy) if self.group else []

    def status(self, generation: Generation) -> Status:
        """See `Status`."""
        if generation in self.abandoned:
            return Status.ABANDONED
        if not all(self.covered(generation)):
            return Status.PENDING
        return Status.PROTECTED if min(map(len, self.spread(generation))) >= self.wanted() else Status.COMPLETE

    def missing(self, generation: Generation) -> list[str]:
        """Parts of which no living store holds a copy."""
        entry = self.entries[generation]
        return sorted(part for part in entry.expected() if not entry.holders.get(part, NOWHERE) & self.domains.keys())

    def degraded(self) -> bool:
        """Whether copies go, or went, where they do not count: a store of the group is draining, or gone."""
        return bool(self.leaving() & self.domains.keys() or self.group - self.domains.keys())

    def holding(self, generation: Generation) -> list[str]:
        """Living stores that hold something of a generation, those that last first."""
        entry = self.entries.get(generation)
        found = {store for stores in entry.holders.values() for store in stores} if entry is not None else set()
        return sorted(found & self.domains.keys(), key=lambda name: (name in self.leaving(), name))

    def passed(self) -> frozenset[Generation]:
        """Generations that can never become complete, if these books are right: the message that said so was lost.

        A rank stores its generations in order, and all its parts of one at once. So a part of which nobody has a copy
        never comes when its rank has stored a newer generation, or when an index that is held announces it.
        """
        newest: dict[tuple[int, str], Generation] = {}
        for generation in sorted(self.entries):
            holders = self.entries[generation].holders
            newest |= {(generation.attempt, part): generation for part, stores in holders.items() if stores}
        return frozenset(
            older
            for older, entry in self.entries.items()
            if older not in self.abandoned
            and any(
                part in entry.holders or newest.get((older.attempt, part), older) > older
                for part in self.missing(older)
            )
        )

    def complete(self) -> list[Generation]:
        """Generations that can be restored, newest first."""
        usable = (Status.COMPLETE, Status.PROTECTED)
        return sorted((g for g in self.entries if self.status(g) in usable), reverse=True)

    def newest(self) -> Generation | None:
        """What would be restored now."""
        return next(iter(self.complete()), None)

    def must_wait(self) -> bool:
        """Whether one was abandoned since the newest complete generation: busy ranks then wait instead of skipping.

        Else ranks that skip in turns would abandon every generation.
        """
        newest = self.newest()
        return any(newest is None or generation > newest for generation in self.abandoned)

    def does_without(self, silent: Iterable[str], dead: Iterable[str]) -> bool:
        """Whether what is restored is the same with and without stores that live and do not answer.

        Not without one that never answered: it may hold anything.
        """
        base = self
        if set(silent) - self.domains.keys():
            return False
        for name in dead:
            base = store_lost(base, name)
        rest = base
        for name in silent:
            rest = store_lost(rest, name)
        return base.newest() == rest.newest()

    def replaces(self, newer: Generation, older: Generation) -> bool:
        """Whether `newer` is complete and survives every loss of domains that `older` survives.

        Losses of up to `wanted() - 1` living domains count, as many as a protected generation survives. Counting larger
        ones would keep buffers for ever: an older generation also lies in stores that serve no worker any more, and no
        newer one can get as many copies as that.

        Losing a set of domains is fatal for a generation when it contains all domains of one of its parts. So the
        domains of each of newer's parts must be more than such a loss takes, or contain those of some part of `older`.
        All of it must hold as long as draining stores live, and when they are gone; with silent stores, and without.
        """
        if newer <= older or self.status(newer) not in (Status.COMPLETE, Status.PROTECTED):
            return False
        views = [(self.covered(newer), self.covered(older), self.wanted())]
        if self.leaving():
            views.append((self.spread(newer), self.spread(older), self.wanted()))
        if self.silent:
            # What nobody has heard of counts for the older one only.
            with_silent = self._covered_with_silent(newer, False), self._covered_with_silent(older, True)
            views.append((*with_silent, self._wanted_with_silent()))
        return all(_outlives(set(new), set(old), wanted) for new, old, wanted in views)

    def _covered_with_silent(self, generation: Generation, if_unheard: bool) -> list[frozenset[str]]:
        parts = zip(self.entries[generation].expected(), self.covered(generation), strict=True)
        silent = self.silent.values()
        return [
            domains | {one.domain for one in silent if one.has(generation, part, if_unheard=if_unheard)}
            for part, domains in parts
        ]

    def _wanted_with_silent(self) -> int:
        domains = {*self.receivers().values(), *(one.domain for one in self.silent.values())}
        return min(self.copies, len(domains))

    def releasable(self) -> frozenset[Generation]:
        """Generations whose buffers are free: abandoned, or replaced by a newer one."""
        newest_first = sorted(self.entries, reverse=True)
        return self.lingering | frozenset(
            older
            for older in newest_first
            if older in self.abandoned or any(self.replaces(newer, older) for newer in newest_first)
        )

    def undercovered(self, generation: Generation) -> dict[str, frozenset[str]]:
        """Parts with fewer copies that last than the domains allow, and the living stores that hold them."""
        entry, lasting = self.entries[generation], self.lasting()
        living = {part: entry.holders.get(part, NOWHERE) & self.domains.keys() for part in entry.expected()}
        return {
            part: frozenset(stores)
            for part, stores in living.items()
            if stores and len({lasting[store] for store in stores if store in lasting}) < self.wanted()
        }


def _outlives(newer: set[frozenset[str]], older: set[frozenset[str]], wanted: int) -> bool:
    weakest = (domains for domains in newer if len(domains) < wanted)
    return all(any(weak <= strong for weak in older) for strong in weakest)


# Transitions.


def store_joined(
    books: Books, store: str, domain: str, attempt: int = 0, incarnation: str = "", number: int = 0
) -> Books:
    """A store is up (again) and has seen `attempt`; what it holds follows in its reports, from `number` on."""
    books = store_lost(books, store)
    return replace(
        books,
        domains={**books.domains, store: domain},
        incarnations={**books.incarnations, store: incarnation},
        heard={**books.heard, store: Heard(number, number)},
        attempt=max(books.attempt, attempt),
    )


def attempts_known(books: Books, attempt: int) -> Books:
    """Somebody else knows of this attempt: the next one comes after it."""
    return replace(books, attempt=max(books.attempt, attempt))


def group_forming(books: Books, attempt: int, stores: Iterable[str]) -> Books:
    """These stores are going to serve the worker group; some of them are still being started.

    Until they are there the former group's count as well: with fewer domains than there will be, an older generation
    would be freed for a newer one that is less safe.
    """
    return replace(books, group=books.group | frozenset(stores)) if attempt == books.attempt else books


def group_formed(books: Books, attempt: int, stores: Iterable[str]) -> Books:
    """These stores serve the current worker group."""
    return replace(books, group=frozenset(stores)) if attempt == books.attempt else books


def group_learned(books: Books, attempt: int, stores: Iterable[str], choice: Generation | None) -> Books:
    """Books that were rebuilt in mid-attempt learn from the stores which group they serve, and what was decided."""
    if attempt != books.attempt:
        return books
    return replace(books, group=frozenset(stores), decided=(attempt, choice))


def store_lost(books: Books, store: str) -> Books:
    """A store is gone, and all it held with it. What no store holds anything of is forgotten."""
    entries = {}
    for generation, entry in books.entries.items():
        entry = entry.without(store, entry.expected() | entry.damaged.keys())
        if any(entry.holders.values()):
            entries[generation] = entry
    domains = {name: domain for name, domain in books.domains.items() if name != store}
    incarnations = {name: one for name, one in books.incarnations.items() if name != store}
    heard = {name: numbers for name, numbers in books.heard.items() if name != store}
    silent = {name: one for name, one in books.silent.items() if name != store}
    return replace(books, domains=domains, incarnations=incarnations, heard=heard, entries=entries, silent=silent)


def store_silent(books: Books, store: str) -> Books:
    """A store lives and does not answer: it is left out until it does. See `Books.silent`."""
    if store not in books.domains:
        return replace(books, silent={**books.silent, store: Silent(store, None)})
    held = {
        generation: frozenset(part for part, stores in entry.holders.items() if store in stores)
        for generation, entry in books.entries.items()
    }
    kept = Silent(books.domains[store], {generation: parts for generation, parts in held.items() if parts})
    books = store_lost(books, store)
    return replace(books, silent={**books.silent, store: kept})


def store_died(books: Books, store: str) -> Books:
    """A store is gone for good: what only it held makes its generations impossible, and the others let go of them.

    Nobody would wait for them to become complete, and their buffers would never come free.
    """
    alone = [g for g, entry in books.entries.items() if any(stores == {store} for stores in entry.holders.values())]
    books = store_lost(books, store)
    for generation in alone:
        books = abandoned(books, generation, f"store {store} died, which held the only copy of a part")
    return books


def draining(books: Books, stores: Iterable[str]) -> Books:
    """The nodes of exactly these stores are going to be taken away."""
    return replace(books, draining=frozenset(stores))


def held(books: Books, report: Held) -> Books:
    """A store holds parts. Ranks that report different structures make the generation unusable, and it says so.

    A report of a store that died, and whose name another one has, counts for nothing. Neither does one from before a
    statement that has been heard: what it tells of may have been freed since.
    """
    generation = report.generation
    if generation.attempt > books.attempt or report.incarnation != books.incarnations.get(report.store):
        return books
    heard = books.heard[report.store]
    if report.number < heard.statement:
        return books
    heard = heard.after(report)
    books = replace(books, heard={**books.heard, report.store: heard})
    if generation in books.freed:
        return replace(books, lingering=books.lingering | {generation})
    if books.decided is not None and books.decided[0] == books.attempt and generation.attempt < books.attempt:
        choice = books.decided[1]
        if choice is None or generation > choice:
            # A store that was silent when it was decided comes back with something newer: too late.
            books = abandoned(books, generation, "an older one has been restored since")
    entry = books.entries.get(generation) or Entry(report.world_size)
    if entry.structure and report.structure and entry.structure != report.structure:
        return abandoned(books, generation, "ranks snapshotted different trees, shapes or shardings")
    entry = _told(entry, report)
    # Copies that differ from what the lowest rank captured count as damaged. Others were compared when they were told.
    parts = entry.differing(report.digests.keys() | report.claims.keys())
    entry = entry.repairable(parts)
    books = replace(books, entries={**books.entries, generation: entry})
    if books.reject_differing and parts:
        return abandoned(books, generation, f"replicas of the parts {sorted(parts)} differ between ranks")
    return books


def stated(books: Books, statement: Statement) -> Books:
    """A store says everything that it holds: what is in the books beyond that is struck out.

    Not by a statement that newer reports have overtaken: the store makes another one soon.
    """
    store = statement.store
    if statement.incarnation != books.incarnations.get(store) or statement.number < books.heard[store].statement:
        return books
    if statement.number >= books.heard[store].newest:
        named = {report.generation: report.parts | report.damaged for report in statement.held}
        for generation, parts in books.heard[store].parts.items():
            books = _struck_out(books, store, generation, parts - named.get(generation, NOWHERE))
        books = replace(books, heard={**books.heard, store: Heard(statement.number, statement.number)})
    for report in statement.held:
        books = held(books, report)
    return books


def _struck_out(books: Books, store: str, generation: Generation, parts: frozenset[str]) -> Books:
    entry = books.entries.get(generation)
    if entry is None or not parts:
        return books
    entry = entry.without(store, parts)
    entries = {g: other for g, other in books.entries.items() if g != generation}
    return replace(books, entries={**entries, generation: entry} if any(entry.holders.values()) else entries)


def _told(entry: Entry, report: Held) -> Entry:
    """Adds a report to what is known."""
    entry = entry.without(report.store, report.parts | report.damaged)
    holders = {part: entry.holders.get(part, NOWHERE) for part in report.announced}
    holders |= {part: entry.holders.get(part, NOWHERE) | {report.store} for part in report.parts}
    digests = {part: {**entry.digests.get(part, {}), report.store: digest} for part, digest in report.digests.items()}
    claims = {part: min(claim, entry.claims.get(part, claim)) for part, claim in report.claims.items()}
    entry = replace(
        entry,
        holders={**entry.holders, **holders},
        structure=entry.structure or report.structure,
        digests={**entry.digests, **digests},
        claims={**entry.claims, **claims},
    )
    return entry.repairable(dict.fromkeys(report.damaged, (report.store,)))


def dropped(books: Books, store: str, generation: Generation, parts: Iterable[str]) -> Books:
    """A store does not say any more that its copies of these parts are good."""
    entry = books.entries.get(generation)
    if entry is None:
        return books
    return replace(books, entries={**books.entries, generation: entry.without(store, parts)})


def abandoned(books: Books, generation: Generation, reason: str) -> Books:
    """The generation can never become complete. Stores that still come with parts of it are told to let go of them."""
    return replace(books, abandoned={generation: reason, **books.abandoned})


def given_up(books: Books, generation: Generation, reason: str) -> Books:
    """A rank of the current attempt did not take, or could not store, this generation.

    One that is complete all the same stays: a rank may have lost the answer.
    """
    if generation.attempt != books.attempt or generation in books.complete():
        return books
    return abandoned(books, generation, reason)


def released(books: Books, generations: Iterable[Generation]) -> Books:
    """The stores were told to free these."""
    gone = frozenset(generations)
    freed = frozenset(sorted(books.freed | gone)[-MAX_FREED:])
    entries = {g: entry for g, entry in books.entries.items() if g not in gone}
    books = replace(books, entries=entries, freed=freed, lingering=books.lingering - gone)
    newest = books.newest()
    kept = {g: reason for g, reason in books.abandoned.items() if newest is None or g > newest or g in books.entries}
    return replace(books, abandoned=kept)


def attempt_started(books: Books, attempt: int) -> tuple[Books, Generation | None]:
    """A new worker group restores the newest complete generation; the incomplete ones newer than that are over.

    Older ones stay until a better covered newer one replaces them: what was chosen may have a single copy left.
    """
    choice = books.newest()
    books = replace(books, attempt=max(books.attempt, attempt), decided=(attempt, choice))
    for generation in books.entries:
        if generation.attempt < attempt and (choice is None or generation > choice):
            books = abandoned(books, generation, "its attempt ended before it was complete")
    return books, choice
