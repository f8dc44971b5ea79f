"""Takes in what peers push: into a buffer of its own, or in place of a copy that was found bad."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import numpy as np

from ray_jax_ckpt.errors import AlreadyHeldError, StoreError
from ray_jax_ckpt.memory.content import Content
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.memory.transfer import PushHeader
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease


@dataclass(frozen=True)
class _Arrival:
    """A push under way.

    Attributes:
        generation: Of what.
        content: What comes.
        slot: The slot that it fills.
        repaired: Or else what is in the buffer that it repairs, and the lease that keeps this buffer meanwhile.
    """

    generation: Generation
    content: Content = field(repr=False)
    slot: int = -1
    repaired: tuple[Content, Lease] | None = None


class Intake:
    """The receiving half of a store. Thread-safe.

    A push is refused before it gets memory if it is not what its own indices describe, if it could not be verified, or
    if its parts are here or on their way: copying twice the same would take twice the memory.

    Args:
        shelf: Where things go.
        timeout_s: Bound of the wait for a buffer.
    """

    def __init__(self, shelf: Shelf, *, timeout_s: float) -> None:
        self._shelf, self._timeout_s = shelf, timeout_s
        self._arrivals: dict[tuple[str, str, int], _Arrival] = {}

    def begin(self, header: PushHeader, *, verify: bool) -> np.ndarray:
        """Memory for a push's bytes. `end` must follow.

        Raises:
            ValueError: The push is malformed, or lacks a digest (IntegrityError) that `verify` asks for.
            AlreadyHeldError: There is no need for it.
            StoreError: There is no memory in time, its attempt is over, or it is under way.
        """
        generation, content = Generation.parse(header.generation), Content.received(header, verify=verify)
        with self._shelf.changed:
            slots_.check_attempt(self._shelf.slots, header.attempt)
            self._refuse_needless(generation, content)
            place = self._repair(header, generation, content)
        return self._buffer(header, generation, content) if place is None else place

    def end(self, header: PushHeader, *, ok: bool) -> bool:
        """All bytes have come and are verified, or not. Returns whether there is more to tell of than before.

        Raises:
            StaleAttemptError: A newer attempt has started meanwhile.
            StoreError: The slot was taken back.
        """
        with self._shelf.changed:
            arrival = self._arrivals.pop(_key(header))
            if arrival.repaired is not None:
                self._end_repair(arrival.content, *arrival.repaired, ok=ok)
            elif ok:
                try:
                    self._shelf.commit(arrival.slot, header.attempt, arrival.content)
                except StoreError:
                    self._cancel(arrival.slot)
                    raise
            else:
                self._cancel(arrival.slot)
        return ok

    def _refuse_needless(self, generation: Generation, content: Content) -> None:
        here = {part for held, _ in self._shelf.held(generation) for part in held.places}
        for arrival in self._arrivals.values():
            here |= arrival.content.places.keys() if arrival.generation == generation else set()
        if content.places and content.places.keys() <= here:
            raise AlreadyHeldError(f"{self._shelf.slots.name} has, or is receiving, all of this of {generation}.")

    def _buffer(self, header: PushHeader, generation: Generation, content: Content) -> np.ndarray:
        slot = self._shelf.await_slot(header.attempt, generation, header.source, "", self._timeout_s)
        segment = self._shelf.allocate(slot, header.total_bytes, header.source)
        with self._shelf.changed:
            # The attempt belongs to the key: one that was fenced may still be under way beside the next one's.
            self._arrivals[_key(header)] = _Arrival(generation, content, slot)
        return segment.view()[: header.total_bytes]

    def _repair(self, header: PushHeader, generation: Generation, content: Content) -> np.ndarray | None:
        """The place of a bad copy of exactly what comes: a repair takes no more memory than was taken."""
        if len(header.parts) != 1 or _key(header) in self._arrivals:
            return None
        found = self._shelf.hole(generation, header.parts[0].id)
        if found is None or found[1].nbytes != header.total_bytes:
            return None
        damaged, place = found
        # Freed and given to another writer, it would be overwritten by bytes that are still coming.
        hold = Lease(f"repair {uuid.uuid4().hex}", generation, None)
        self._shelf.update(lambda slots: slots_.lease(slots, hold))
        self._arrivals[_key(header)] = _Arrival(generation, content, repaired=(damaged, hold))
        return place

    def _end_repair(self, content: Content, damaged: Content, hold: Lease, *, ok: bool) -> None:
        for part, checks in content.checks.items() if ok else ():
            damaged.repair(part, checks)
        self._shelf.update(lambda slots: slots_.unlease(slots, hold.id))

    def _cancel(self, slot: int) -> None:
        self._shelf.update(lambda slots: slots_.cancel(slots, slot))


def _key(header: PushHeader) -> tuple[str, str, int]:
    return header.source, header.generation, header.attempt
