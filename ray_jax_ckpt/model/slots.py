"""The buffers of one store as pure transitions: who may write into which, what it holds, when it is free.

A slot is one buffer. A writer is granted an EMPTY one, FILLING it, and commits it, HELD. `release` frees what is held,
or marks it CONDEMNED while a lease is on it. When a newer attempt starts, slots being filled by a writer that may still
be alive are STRANDED until its process is gone: a stalled copy cannot be refused, so its buffer must not pass on
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray_jax_ckpt.errors import StaleAttemptError, StoreError
from ray_jax_ckpt.model.shards import Generation


class Phase(StrEnum):
    """What a slot is doing. A slot that is not listed is free."""

    FILLING = "filling"
    HELD = "held"
    CONDEMNED = "condemned"
    STRANDED = "stranded"


@dataclass(frozen=True)
class Slot:
    """One buffer in use.

    Attributes:
        generation: What is or will be in it.
        source: The store that the bytes come from; the store's own name for its own worker's.
        attempt: The attempt of the writer, later than the generation's own when a restored one is copied again.
        phase: See `Phase`.
        writer: Identity of the process that fills it, "" for the store itself.
    """

    generation: Generation
    source: str
    attempt: int
    phase: Phase = Phase.FILLING
    writer: str = ""


@dataclass(frozen=True)
class Lease:
    """A hold on what a store has of one generation.

    Attributes:
        id: Which; the same again replaces it.
        generation: Of what.
        attempt: It ends with this attempt. None: it belongs to the driver's life.
        source: Only what this source has filled; None: all.
        persists: For an upload to storage: it gives way to a worker's lease, since no upload may stop snapshots.
        driver: Whose upload it is; "" for what is none.
    """

    id: str
    generation: Generation
    attempt: int | None
    source: str | None = None
    persists: bool = False
    driver: str = ""

    @classmethod
    def of_handle(cls, generation: Generation) -> Lease:
        """The hold that the handle of a forced snapshot has."""
        return cls(f"handle {generation}", generation, generation.attempt)

    def keeps(self, slot: Slot) -> bool:
        """Whether a slot is not to be freed."""
        return slot.generation == self.generation and self.source in (None, slot.source)

    @property
    def takes_buffer(self) -> bool:
        """Whether it may last longer than two snapshots, so that its source needs one more buffer meanwhile."""
        return self.persists or self.attempt is not None


@dataclass(frozen=True)
class Slots:
    """All slots of a store.

    Attributes:
        name: The store.
        per_source: Slots that one source may use at a time. Two let a new generation arrive while the last one is kept;
            a worker's or an upload's lease on one adds a third, so that a single kept generation never stops snapshots.
        attempt: The newest attempt seen: writes of older ones are refused.
        driver: Identity of the driver that began it: uploads of others are refused. "": not known yet.
        used: By slot id.
        leases: By lease id.
        next_id: Id of the next slot.
    """

    name: str
    per_source: int = 2
    attempt: int = 0
    driver: str = ""
    used: Mapping[int, Slot] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)
    next_id: int = 0

    def of_source(self, source: str) -> dict[int, Slot]:
        """Slots filled from one source, stranded ones included."""
        return {key: slot for key, slot in self.used.items() if slot.source == source}

    def holding(self, generation: Generation) -> dict[int, Slot]:
        """Slots that hold parts of a generation which can be read."""
        readable = (Phase.HELD, Phase.CONDEMNED)
        return {k: slot for k, slot in self.used.items() if slot.generation == generation and slot.phase in readable}

    def generations(self) -> set[Generation]:
        """Generations of which something is held and not about to be freed."""
        return {slot.generation for slot in self.used.values() if slot.phase is Phase.HELD}


def grant(slots: Slots, generation: Generation, source: str, attempt: int, writer: str) -> tuple[Slots, int | None]:
    """Gives a writer a slot, or None while all that its source may use are taken.

    Raises:
        StaleAttemptError: The writer belongs to an attempt that a newer one has replaced.
        StoreError: This source's parts of this generation are here or on their way.
    """
    check_attempt(slots, attempt)
    mine = slots.of_source(source)
    if any(slot.generation == generation and slot.phase is not Phase.STRANDED for slot in mine.values()):
        raise StoreError(f"{slots.name} already has or is receiving generation {generation} from {source}.")
    kept = [slot for slot in mine.values() if any(hold.takes_buffer and hold.keeps(slot) for hold in _holds(slots))]
    if len(mine) >= slots.per_source + bool(kept):
        return slots, None
    slot = Slot(generation, source, attempt, Phase.FILLING, writer)
    return replace(slots, used={**slots.used, slots.next_id: slot}, next_id=slots.next_id + 1), slots.next_id


def commit(slots: Slots, key: int, attempt: int) -> Slots:
    """What the writer was granted is filled and verified.

    Raises:
        StaleAttemptError: A newer attempt has started since.
        StoreError: The slot was taken back.
    """
    check_attempt(slots, attempt)
    slot = slots.used.get(key)
    if slot is None or slot.phase is not Phase.FILLING or slot.attempt != attempt:
        raise StoreError(f"{slots.name}: slot {key} is not being filled by attempt {attempt}: {slot}.")
    return replace(slots, used={**slots.used, key: replace(slot, phase=Phase.HELD)})


def cancel(slots: Slots, key: int) -> Slots:
    """The writer failed and will not touch the slot again."""
    slot = slots.used.get(key)
    return slots if slot is None or slot.phase is Phase.HELD else _free(slots, [key])


def release(slots: Slots, generations: Iterable[Generation]) -> Slots:
    """Frees what is held of these generations; what is leased goes when its last lease ends."""
    gone = set(generations)
    held = {key: slot for key, slot in slots.used.items() if slot.generation in gone and slot.phase is Phase.HELD}
    leased = {key: slot for key, slot in held.items() if any(hold.keeps(slot) for hold in _holds(slots))}
    condemned = {key: replace(slot, phase=Phase.CONDEMNED) for key, slot in leased.items()}
    return _free(replace(slots, used={**slots.used, **condemned}), held.keys() - leased.keys())


def fence(slots: Slots, attempt: int, driver: str = "") -> Slots:
    """A newer attempt has started: older writers are refused from now on, and their leases end.

    With another driver's the uploads end that the one before had begun: it may be a zombie, and does not end them.
    """
    if attempt == slots.attempt and not slots.driver:
        slots = replace(slots, driver=driver)
    if attempt <= slots.attempt:
        return slots
    used = {
        key: replace(slot, phase=Phase.STRANDED) if slot.phase is Phase.FILLING and slot.attempt < attempt else slot
        for key, slot in slots.used.items()
    }
    ended = [
        key
        for key, lease in slots.leases.items()
        if (lease.attempt is not None and lease.attempt < attempt) or (driver and lease.driver not in ("", driver))
    ]
    return _end_leases(replace(slots, attempt=attempt, driver=driver, used=used), ended)


def writer_gone(slots: Slots, writer: str) -> Slots:
    """A writer's process does not exist any more: what it left half filled is free."""
    left = (Phase.FILLING, Phase.STRANDED)
    return _free(slots, [k for k, slot in slots.used.items() if slot.writer == writer and slot.phase in left])


def writer_starts(slots: Slots, writer: str) -> Slots:
    """A writer asks for a buffer: one that it was granted before, without hearing of it in time, is free."""
    filling = [k for k, slot in slots.used.items() if slot.writer == writer and slot.phase is Phase.FILLING]
    return _free(slots, filling)


def lease(slots: Slots, hold: Lease) -> Slots:
    """Keeps a generation's buffers, also those that are still being filled, until `unlease`.

    Raises:
        StaleAttemptError: The lease's attempt, or its driver, has been replaced.
        StoreError: Nothing of that generation is held or on its way; or it is for an upload, and another generation is
            kept already.
    """
    if hold.attempt is not None:
        check_attempt(slots, hold.attempt)
    check_driver(slots, hold.driver)
    if not any(hold.keeps(slot) and slot.phase is not Phase.STRANDED for slot in slots.used.values()):
        raise StoreError(f"{slots.name} holds nothing of generation {hold.generation}.")
    others = {k: other for k, other in slots.leases.items() if other.generation != hold.generation}
    kept = [other for other in others.values() if other.takes_buffer and not other.persists]
    if hold.persists and kept:
        raise StoreError(
            f"{slots.name} has no buffer to spare for an upload of generation {hold.generation}: it keeps "
            f"{', '.join(f'{other.generation} ({other.id})' for other in kept)}. Let go of handles of forced snapshots "
            "that are not needed any more."
        )
    # There is one upload at a time: another one's lease is of a coordinator that has died, and nobody would end it. To
    # a worker's what is being uploaded gives way.
    ending = slots.leases if hold.persists else others if hold.takes_buffer else {}
    slots = _end_leases(slots, [key for key, other in ending.items() if other.persists and key != hold.id])
    return replace(slots, leases={**slots.leases, hold.id: hold})


def unlease(slots: Slots, lease_id: str) -> Slots:
    """Ends a lease; an unknown one is fine, since ends may be repeated."""
    return _end_leases(slots, [lease_id])


def _end_leases(slots: Slots, ids: Iterable[str]) -> Slots:
    gone = set(ids)
    slots = replace(slots, leases={key: held for key, held in slots.leases.items() if key not in gone})
    condemned = {key: slot for key, slot in slots.used.items() if slot.phase is Phase.CONDEMNED}
    free = [key for key, slot in condemned.items() if not any(hold.keeps(slot) for hold in _holds(slots))]
    return _free(slots, free)


def _holds(slots: Slots) -> Iterable[Lease]:
    return slots.leases.values()


def _free(slots: Slots, keys: Iterable[int]) -> Slots:
    gone = set(keys)
    return replace(slots, used={key: slot for key, slot in slots.used.items() if key not in gone})


def check_attempt(slots: Slots, attempt: int) -> None:
    """Raises StaleAttemptError if a newer attempt has started."""
    if attempt < slots.attempt:
        raise StaleAttemptError(
            f"{slots.name} serves attempt {slots.attempt}; this request is of attempt {attempt}, "
            "which has been replaced."
        )


def check_driver(slots: Slots, driver: str) -> None:
    """Raises StaleAttemptError if an upload is of a driver that a newer one has replaced."""
    if driver and slots.driver not in ("", driver):
        raise StaleAttemptError(
            f"{slots.name} serves attempt {slots.attempt} of another driver of this run; this one has been replaced, "
            "and what it wants to be done on storage is refused."
        )
