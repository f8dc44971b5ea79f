"""Reads a located generation's bytes: by mapping the memory of stores on this node, by Flight from the others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from ray_jax_ckpt.batch import BatchMemory
from ray_jax_ckpt.errors import (
    AuthenticationError,
    CheckpointError,
    IntegrityError,
    RestoreTimeoutError,
    SnapshotLostError,
)
from ray_jax_ckpt.memory import arena
from ray_jax_ckpt.memory.messages import Located
from ray_jax_ckpt.memory.tls import Tls
from ray_jax_ckpt.memory.transfer import FlightClients, Range, streams_for
from ray_jax_ckpt.model.recovery import NotHeldError, Read, Span, Want, assign, merge, plan_reads
from ray_jax_ckpt.model.shards import Box, extent, volume, within

# What a second try at the same store cannot change.
_FINAL = (SnapshotLostError, RestoreTimeoutError, AuthenticationError)


@dataclass
class Failures:
    """What holders said instead of serving.

    Attributes:
        said: By holder, in order.
        out: Holders that are not asked again.
    """

    said: dict[str, list[CheckpointError]] = field(default_factory=lambda: defaultdict(list))
    out: set[str] = field(default_factory=set)

    def add(self, holder: str, error: CheckpointError) -> None:
        """A holder that failed once is asked again only where no other is left; one that failed twice is not."""
        self.said[holder].append(error)
        if isinstance(error, _FINAL) or len(self.said[holder]) > 1:
            self.out.add(holder)

    def usable(self, names: Sequence[str]) -> list[str]:
        """Of the holders of a part, those to ask: who has not failed, else who may succeed yet."""
        return [name for name in names if name not in self.said] or [name for name in names if name not in self.out]

    def explain(self, want: int, parts: Sequence[str], holders: Mapping[str, Sequence[str]]) -> NotHeldError:
        """Nobody is left to ask for these parts of a wanted box."""
        names = sorted({name for part in parts for name in holders.get(part, ())})
        errors = [error for name in names for error in self.said.get(name, ())]
        kind = SnapshotLostError
        if any(isinstance(error, RestoreTimeoutError) for error in errors):
            kind = RestoreTimeoutError
        elif errors and all(isinstance(error, IntegrityError) for error in errors):
            kind = IntegrityError
        said = {name: " / ".join(str(error) for error in self.said.get(name, ())) for name in names}
        return NotHeldError(want, parts, said, kind)


class Reader:
    """Serves wanted boxes from the holders of a generation. A context manager: views it returned die with it.

    A holder that fails is replaced by the next one for what is missing. Not thread-safe.

    Args:
        located: What to read, kept from being freed by the caller.
        node_id: The reader's node.
        secret: The run's.
        verify: Whether bytes that travel are digested. Those in place were, when the generation was chosen.
        timeout_s: Bound of each `fetch`.
        seat: The reader's number among those that read at the same time, so that they do not all ask the same holder.
        streams: Most connections for one transfer.
        suspect: Is told the first failure of each holder.
        tls: Certificates for transfers.
    """

    def __init__(
        self,
        located: Located,
        node_id: str,
        secret: str,
        *,
        verify: bool,
        timeout_s: float,
        seat: int = 0,
        streams: int = 1,
        suspect: Callable[[str, str], None] = lambda holder, said: None,
        tls: Tls | None = None,
    ) -> None:
        self._located, self._verify, self._timeout_s = located, verify, timeout_s
        self._seat, self._streams, self._suspect = seat, streams, suspect
        self._near = {name for name, view in located.stores.items() if view.node_id == node_id}
        self._clients = FlightClients(secret, tls)
        self._mappings: dict[str, arena.Mapping] = {}
        self._failures, self._memory = Failures(), BatchMemory()
        self.fetched: dict[str, int] = defaultdict(int)
        """Bytes that came from each store on another node, or were asked for in vain."""

    @property
    def used_peers(self) -> bool:
        """Whether any byte came from another node."""
        return bool(self.fetched)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        for mapping in self._mappings.values():
            mapping.close()

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """One array per wanted box: of mapped memory, read-only, where the box lies there in one piece.

        They are valid until the next call, which uses the other memory again.

        Raises:
            NotHeldError: A box is not held completely, or no holder could serve it.
        """
        deadline = time.monotonic() + self._timeout_s
        self._memory.reset()
        results: list[np.ndarray | None] = [None] * len(wants)
        reads = self._planned(wants)
        while reads:
            sources = self._mapped(reads) | self._pulled(reads, deadline)
            for number, source in sources.items():
                read = reads[number]
                block = source.view(dtypes[read.want]).reshape(extent(read.span))
                if read.span == wants[read.want].box:
                    results[read.want] = block
                else:
                    self._place(results, read, block, wants[read.want].box)
            reads = self._elsewhere([read for number, read in enumerate(reads) if number not in sources])
        return [
            np.empty(extent(want.box), dtype) if result is None else result
            for result, want, dtype in zip(results, wants, dtypes, strict=True)
        ]

    def _place(self, results: list[np.ndarray | None], read: Read, block: np.ndarray, box: Box) -> None:
        """Puts what was read where it belongs in the wanted box."""
        target = results[read.want]
        if target is None:
            memory = self._memory.take(volume(box) * block.dtype.itemsize)
            target = results[read.want] = memory.view(block.dtype).reshape(extent(box))
        target[within(read.shared, box)] = block[within(read.shared, read.span)]

    def _planned(self, wants: Sequence[Want]) -> list[Read]:
        holders = {part: self._failures.usable(names) for part, names in self._located.holders.items()}
        try:
            return plan_reads(wants, holders, self._near, seat=self._seat, loads=self.fetched)
        except NotHeldError as error:
            raise self._failures.explain(error.want, error.parts, self._located.holders) from None

    def _elsewhere(self, reads: Sequence[Read]) -> list[Read]:
        """The same reads from holders that have not failed."""
        holders = {}
        for read in reads:
            names = self._located.holders[read.stored.part]
            holders[read.stored.part] = self._failures.usable(names)
            if not holders[read.stored.part]:
                raise self._failures.explain(read.want, [read.stored.part], self._located.holders)
        pieces = [(read.stored.part, read.num_bytes) for read in reads]
        chosen = assign(pieces, holders, self._near, seat=self._seat, loads=self.fetched)
        return [replace(read, holder=holder) for read, holder in zip(reads, chosen, strict=True)]

    def _failed(self, holder: str, error: CheckpointError) -> None:
        if holder not in self._failures.said:
            self._suspect(holder, str(error))
        self._failures.add(holder, error)

    # On this node.

    def _mapped(self, reads: Sequence[Read]) -> dict[int, np.ndarray]:
        """The bytes of reads from stores of this node, without a copy, by number."""
        sources, failed = {}, set()
        for number, read in enumerate(reads):
            if read.holder in self._near and read.holder not in failed:
                try:
                    sources[number] = self._view(read)
                except CheckpointError as error:
                    failed.add(read.holder)
                    self._failed(read.holder, error)
        return sources

    def _view(self, read: Read) -> np.ndarray:
        place = self._located.stores[read.holder].places[read.stored.part]
        mapping = self._mappings.get(place.segment.id)
        if mapping is None:
            mapping = self._mappings[place.segment.id] = arena.open_segment(place.segment)
        start = place.offset + read.offset
        return mapping.view()[start : start + read.num_bytes]

    # From other nodes.

    def _pulled(self, reads: Sequence[Read], deadline: float) -> dict[int, np.ndarray]:
        """The bytes of reads from stores of other nodes, by number; all holders send at the same time."""
        far = [number for number, read in enumerate(reads) if read.holder not in self._near]
        spans = merge([reads[number] for number in far])
        if not spans:
            return {}
        buffers = {holder: [self._memory.take(span.num_bytes) for span in asked] for holder, asked in spans.items()}
        sources: dict[int, np.ndarray] = {}
        with ThreadPoolExecutor(len(spans), "rjc-restore") as threads:
            jobs = {
                holder: threads.submit(self._pull, holder, asked, buffers[holder], deadline)
                for holder, asked in spans.items()
            }
            for holder, job in jobs.items():
                try:
                    job.result()
                except CheckpointError as error:
                    self._failed(holder, error)
                    continue
                for span, buffer in zip(spans[holder], buffers[holder], strict=True):
                    for number in span.reads:
                        read = reads[far[number]]
                        start = read.offset - span.offset
                        sources[far[number]] = buffer[start : start + read.num_bytes]
        return sources

    def _pull(self, holder: str, spans: Sequence[Span], buffers: Sequence[np.ndarray], deadline: float) -> None:
        name, total = str(self._located.generation), sum(span.num_bytes for span in spans)
        self.fetched[holder] += total
        ranges: list[Range] = [
            (name, span.part, span.offset, span.num_bytes, buffer)
            for span, buffer in zip(spans, buffers, strict=True)
            if span.num_bytes
        ]
        # Time for another holder must be left when this one has stopped, but not died.
        share = 0.5 if self._spare(holder, spans) else 1.0
        self._clients.fetch(
            self._located.stores[holder].address,
            ranges,
            timeout_s=max(0.001, share * (deadline - time.monotonic())),
            verify=self._verify,
            streams=streams_for(total, self._streams),
        )

    def _spare(self, holder: str, spans: Sequence[Span]) -> bool:
        """Whether others could serve all that is asked of a holder."""
        parts = {span.part for span in spans}
        return all({*self._failures.usable(self._located.holders[part])} - {holder} for part in parts)
