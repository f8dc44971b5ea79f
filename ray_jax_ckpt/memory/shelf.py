"""What a store holds: its buffers' states, the memory behind them and what is in it, always in step."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ray_jax_ckpt.errors import MemoryLimitError, SnapshotLostError, SnapshotTimeoutError, StoreError
from ray_jax_ckpt.memory.arena import Arena, Segment, capacity_of
from ray_jax_ckpt.memory.content import Content
from ray_jax_ckpt.memory.messages import Place, RankIndex
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.books import Held, Statement
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Slots

logger = logging.getLogger(__name__)

# Waiters look again so often, whether woken or not.
LOOK_INTERVAL_S = 0.5
# Buffers of this size and more take long enough to make (0.1 s and more) that the second one is made in advance.
PREPARE_BYTES = 64 << 20
# What is made in advance leaves the cores and the interpreter to others so many times as long as it takes them.
IDLE_FACTOR = 3.0

Piece = tuple[Content, np.ndarray, str]
"""What is in a buffer, the buffer, and a part in it."""


class Shelf:
    """Pure `Slots`, a segment of memory for each slot in use, and the contents of those that are held.

    Thread-safe. Where several steps have to be one, callers hold `changed`, which may be entered again.

    Args:
        name: The store's.
        per_source: Buffers that each source may use.
        attempt: Writes of attempts before this one are refused.
        max_bytes: Upper limit of its memory.
    """

    def __init__(self, name: str, *, per_source: int, attempt: int, max_bytes: int | None = None) -> None:
        self.slots = Slots(name, per_source=per_source, attempt=attempt)
        self.changed = threading.Condition()
        self._arena = Arena(max_bytes)
        self._segments: dict[int, Segment] = {}
        self._contents: dict[int, Content] = {}
        self._sizes: dict[str, int] = {}
        self._retired = False
        self._prepared: set[str] = set()
        # One buffer is made at a time: the one that is needed now may be the one that is being made in advance.
        self._making = threading.Lock()
        self._hurrying = 0
        self._said = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, free ones included."""
        return self._arena.nbytes_held

    def limit(self, max_bytes: int | None) -> None:
        """Sets another limit for buffers that are made from now on."""
        self._arena.max_bytes = max_bytes

    def update(self, transition: Callable[[Slots], Slots]) -> None:
        """Performs a transition, and frees the memory of slots that are gone by it. Raises what it raises."""
        with self.changed:
            before, self.slots = self.slots.attempt, transition(self.slots)
            if self.slots.attempt > before:
                # Another group comes, with buffers of other sizes.
                self._sizes.clear()
                self._prepared.clear()
                self._retired = False
            for key in [key for key in self._segments if key not in self.slots.used]:
                self._contents.pop(key, None)
                self._arena.free(self._segments.pop(key))
            self.changed.notify_all()

    # Filling.

    def await_slot(self, attempt: int, generation: Generation, source: str, writer: str, timeout_s: float) -> int:
        """A slot for a writer, as soon as its source may have one. See `slots.grant`.

        Raises:
            StaleAttemptError: A newer attempt has started.
            StoreError: It is here already.
            SnapshotTimeoutError: None became free in time.
        """
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                slots, slot = slots_.grant(self.slots, generation, source, attempt, writer)
                if slot is not None:
                    self.slots = slots
                    return slot
                left = deadline - time.monotonic()
                if left <= 0:
                    taken = [f"{s.generation} ({s.phase})" for s in self.slots.of_source(source).values()]
                    raise SnapshotTimeoutError(
                        f"Store {self.slots.name} had no free buffer for generation {generation} within "
                        f"{timeout_s:g} s: they hold {', '.join(taken)}. A peer that is slow or gone keeps them; "
                        "raise timeout_s or look there."
                    )
                self.changed.wait(min(left, LOOK_INTERVAL_S))

    def allocate(self, slot: int, num_bytes: int, source: str) -> Segment:
        """Memory for a slot; the slot is free again if there is none.

        Raises:
            MemoryLimitError: The node cannot give that much.
            StoreError: The slot was taken back meanwhile.
        """
        with self.changed:
            self._sizes[source] = num_bytes
        if not self._arena.fits(num_bytes):
            # Another group, or another tree: what is free has the sizes of the last one.
            self._arena.trim(self._sizes.values())
        try:
            with self._hurry(), self._making:
                segment = self._arena.allocate(num_bytes, tag=source)
        except BaseException:
            self.update(lambda slots: slots_.cancel(slots, slot))
            raise
        with self.changed:
            if slot not in self.slots.used:
                self._arena.free(segment)
                raise StoreError(f"{self.slots.name}: slot {slot} was taken back while its buffer was made.")
            self._segments[slot] = segment
        return segment

    def commit(self, slot: int, attempt: int, content: Content) -> None:
        """A slot is filled and verified. Raises StaleAttemptError or StoreError (it was taken back)."""
        with self.changed:
            slots = slots_.commit(self.slots, slot, attempt)
            self._contents[slot] = content
            self.update(lambda _: slots)

    # The second buffer of a source.

    def prepare(self, source: str) -> None:
        """Begins to make the buffer that the source's next generation needs, as it has filled the first one.

        Returns at once; called after every `commit`, of which only the first counts. Does nothing while generations of
        earlier attempts are held: their memory is not to be exceeded by more than the one buffer until they are gone.
        """
        with self.changed:
            attempts = {slot.generation.attempt for slot in self.slots.used.values()}
            if source in self._prepared or self._sizes.get(source, 0) < PREPARE_BYTES:
                return
            self._prepared.add(source)
            if attempts != {self.slots.attempt}:
                return
        threading.Thread(target=self._prepare, args=(source,), name=f"buffer for {source}", daemon=True).start()

    def _prepare(self, source: str) -> None:
        with self._making:
            with self.changed:
                num_bytes = self._sizes.get(source)
                limit = self.slots.per_source * sum(map(capacity_of, self._sizes.values()))
            if num_bytes is None:
                return
            try:
                self._arena.prepare(num_bytes, source, limit=limit, pace=self._pace)
                if self._retired:
                    self._arena.trim()
            except (MemoryLimitError, StoreError) as error:
                logger.info("No second buffer was made in advance for %s: %s", source, error)

    @contextlib.contextmanager
    def _hurry(self) -> Iterator[None]:
        """While it is open, what is made in advance takes no breaks."""
        with self.changed:
            self._hurrying += 1
        try:
            yield
        finally:
            with self.changed:
                self._hurrying -= 1

    def _pace(self, seconds: float) -> None:
        if not self._hurrying:
            time.sleep(seconds * IDLE_FACTOR)

    # Freeing.

    def release(self, generations: Iterable[Generation]) -> None:
        """These are abandoned, or better covered newer ones replace them."""
        self.update(lambda slots: slots_.release(slots, generations))
        with self.changed:
            # A source that has nothing here any more pushed once, what a lost store had held, or serves nobody now.
            sources = {slot.source for slot in self.slots.used.values()}
            self._sizes = {source: size for source, size in self._sizes.items() if source in sources}
            known = self.slots.name in self._sizes or self._retired
            useful = list(self._sizes.values())
        # When its own worker has asked for a buffer in this attempt, so has every peer by the time something is freed:
        # other sizes were an earlier group's.
        if known:
            self._arena.trim(useful)

    def retire(self) -> None:
        """No group comes: from now on there is no memory but that of what is held."""
        with self.changed:
            self._sizes.clear()
            self._retired = True
        self._arena.trim()

    # Reading.

    def held(self, generation: Generation) -> list[tuple[Content, Segment]]:
        """What can be read of a generation, slot by slot."""
        with self.changed:
            return [(self._contents[key], self._segments[key]) for key in self.slots.holding(generation)]

    def find(self, generation: Generation, part: str) -> tuple[Segment, int, int]:
        """Memory, offset and size of a part. Raises SnapshotLostError if it is not held."""
        for content, segment in self.held(generation):
            place = content.places.get(part)
            if place is not None:
                return segment, *place
        raise SnapshotLostError(f"Store {self.slots.name} does not hold {part} of generation {generation}.")

    def view(self, generation: Generation) -> tuple[dict[str, Place], list[RankIndex], frozenset[str]]:
        """Where the parts of a generation lie, the indices that are here, and which parts this store's worker filled.

        What is here twice is where the worker filled it.
        """
        places, indices, own = {}, [], set()
        with self.changed:
            for key, slot in self.slots.holding(generation).items():
                content, handle = self._contents[key], self._segments[key].handle()
                here = {part: Place(handle, offset, size) for part, (offset, size) in content.places.items()}
                is_own = slot.source == self.slots.name
                own |= here.keys() if is_own else set()
                places = {**places, **here} if is_own else {**here, **places}
                indices += content.rank_indices()
        return places, indices, frozenset(own)

    def pieces(self, generation: Generation, parts: Sequence[str]) -> list[Piece]:
        """Those of the parts that are held, each once. Raises SnapshotLostError if none is."""
        with self.changed:
            pieces, seen = [], set()
            for content, segment in self.held(generation):
                for part in [p for p in parts if p in content.places and p not in seen]:
                    seen.add(part)
                    pieces.append((content, segment.view(), part))
        if not pieces:
            raise SnapshotLostError(f"{self.slots.name} does not hold generation {generation} any more.")
        return pieces

    def statement(self, incarnation: str) -> Statement:
        """Everything that is held, in words for the books."""
        with self.changed:
            number = self._said = self._said + 1
            found = [self.report(generation, incarnation, number) for generation in sorted(self.slots.generations())]
        return Statement(self.slots.name, incarnation, number, tuple(report for report in found if report))

    def report(self, generation: Generation, incarnation: str, number: int = 0) -> Held | None:
        """What is held of a generation, in words for the books; None if it is nothing."""
        with self.changed:
            contents = [content for content, _ in self.held(generation)]
            if not contents:
                return None
            if not number:
                number = self._said = self._said + 1
            indices = [index for content in contents for index in content.indices]
            parts = frozenset(part for content in contents for part in content.places)
            damaged = frozenset(part for content in contents for part in content.holes) - parts
            digests = {part: text for content in contents for part, text in content.digests().items()}
            claims: dict[str, tuple[int, str]] = {}
            for content in contents:
                claims = {**claims, **{p: min(c, claims.get(p, c)) for p, c in content.claims.items()}}
        layout = indices[0].layout
        return Held(
            store=self.slots.name,
            generation=generation,
            world_size=layout.world_size,
            parts=parts,
            announced=frozenset(part.id for index in indices for part in index.layout.parts),
            structure=layout.structure,
            incarnation=incarnation,
            damaged=damaged,
            digests=digests,
            claims=claims,
            number=number,
        )

    # Damage.

    def everything(self) -> list[tuple[Generation, Content, Segment]]:
        """All that can be read, slot by slot."""
        with self.changed:
            generations = sorted({self.slots.used[key].generation for key in self._contents})
            return [(one, content, segment) for one in generations for content, segment in self.held(one)]

    def has(self, content: Content) -> bool:
        """Whether this is still what some buffer holds."""
        with self.changed:
            return any(content is one for one in self._contents.values())

    def verify(self, generation: Generation) -> frozenset[str]:
        """Digests everything held of a generation again, and drops what is bad. Returns that."""
        bad: set[str] = set()
        for content, segment in self.held(generation):
            bad |= self.drop_bad(content, [p for p in list(content.places) if not content.intact(p, segment.view())])
        return frozenset(bad)

    def drop_bad(self, content: Content, parts: Iterable[str]) -> frozenset[str]:
        """Drops parts that were found bad, and returns those that really were.

        What was freed while it was looked at is other bytes by now, and no damage.
        """
        with self.changed:
            if not self.has(content):
                return frozenset()
            bad = frozenset(parts) & content.places.keys()
            content.drop(bad)
            return bad

    def drop(self, generation: Generation, parts: Iterable[str]) -> None:
        """Somebody else found these bad."""
        gone = set(parts)
        for content, _ in self.held(generation):
            self.drop_bad(content, gone)

    def hole(self, generation: Generation, part: str) -> tuple[Content, np.ndarray] | None:
        """Where a good copy of a dropped part may be written, if there is such a place."""
        for content, segment in self.held(generation):
            if part in content.holes:
                offset, size = content.holes[part]
                return content, segment.view()[offset : offset + size]
        return None
