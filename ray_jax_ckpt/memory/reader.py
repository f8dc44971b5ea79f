"""Reads a located generation's bytes: by mapping the memory of stores on this node, by Flight from the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ray_jax_ckpt.memory.arena import Mapping, open_segment
from ray_jax_ckpt.memory.messages import Located
from ray_jax_ckpt.memory.transfer import FlightClients, Range
from ray_jax_ckpt.model.recovery import Read, Want, plan_reads
from ray_jax_ckpt.model.shards import extent, within


class Reader:
    """Serves wanted boxes from the holders of a generation. A context manager: views it returned die with it.

    Args:
        located: What to read, kept from being freed by the caller.
        node_id: The reader's node.
        secret: The run's.
        verify: Whether bytes that travel are digested. Those in place were, when the generation was chosen.
        timeout_s: Bound of each transfer.
    """

    def __init__(self, located: Located, node_id: str, secret: str, *, verify: bool, timeout_s: float) -> None:
        self._located, self._verify, self._timeout_s = located, verify, timeout_s
        self._near = [name for name, view in located.stores.items() if view.node_id == node_id]
        self._clients = FlightClients(secret)
        self._mappings: dict[str, Mapping] = {}
        self.used_peers = False
        """Whether any byte came from another node."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        for mapping in self._mappings.values():
            mapping.close()

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """One array per wanted box; a read-only view of mapped memory where the box lies there in one piece.

        Raises:
            KeyError: A box is not held completely; the argument is its position.
            RestoreError: A transfer failed.
        """
        reads = plan_reads(wants, self._located.holders, self._near)
        results: list[np.ndarray | None] = [None] * len(wants)
        sources = self._sources(reads)
        for read, source in zip(reads, sources, strict=True):
            want, dtype = wants[read.want], dtypes[read.want]
            block = source.view(dtype).reshape(extent(read.span))
            if read.span == want.box:
                results[read.want] = block
                continue
            target = results[read.want]
            if target is None:
                target = results[read.want] = np.empty(extent(want.box), dtype)
            target[within(read.shared, want.box)] = block[within(read.shared, read.span)]
        return [_or_empty(r, want, dtype) for r, want, dtype in zip(results, wants, dtypes, strict=True)]

    def _sources(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """The bytes of every read, as uint8 arrays."""
        sources: list[np.ndarray] = []
        ranges: dict[str, list[Range]] = defaultdict(list)
        for read in reads:
            if read.holder in self._near:
                sources.append(self._mapped(read))
                continue
            buffer = np.empty(read.num_bytes, np.uint8)
            sources.append(buffer)
            if read.num_bytes:
                where = (str(self._located.generation), read.stored.part, read.offset, read.num_bytes, buffer)
                ranges[read.holder].append(where)
        self._pull(ranges)
        return sources

    def _mapped(self, read: Read) -> np.ndarray:
        place = self._located.stores[read.holder].places[read.stored.part]
        mapping = self._mappings.get(place.segment.id)
        if mapping is None:
            mapping = self._mappings[place.segment.id] = open_segment(place.segment)
        start = place.offset + read.offset
        return mapping.view()[start : start + read.num_bytes]

    def _pull(self, ranges: dict[str, list[Range]]) -> None:
        if not ranges:
            return
        self.used_peers = True
        with ThreadPoolExecutor(len(ranges), "rjc-restore") as threads:
            jobs = [
                threads.submit(
                    self._clients.fetch,
                    self._located.stores[holder].address,
                    asked,
                    timeout_s=self._timeout_s,
                    verify=self._verify,
                )
                for holder, asked in ranges.items()
            ]
            for job in jobs:
                job.result()


def _or_empty(result: np.ndarray | None, want: Want, dtype: np.dtype) -> np.ndarray:
    """A box without elements may need no read."""
    if result is not None:
        return result
    assert math.prod(extent(want.box)) == 0
    return np.empty(extent(want.box), dtype)
