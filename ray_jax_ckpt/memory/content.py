"""What is in a buffer of a store: indices, the places of parts, and how parts are checked and sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ray_jax_ckpt.errors import StoreError
from ray_jax_ckpt.memory.digest import digest
from ray_jax_ckpt.memory.messages import RankIndex
from ray_jax_ckpt.memory.transfer import PartSpan, PushHeader
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.pushes import PushJob


@dataclass
class Content:
    """What is in a held buffer.

    Attributes:
        raw: The encoded indices of the ranks it came from.
        indices: The same, decoded.
        places: Offset and size of each part that is here and good.
    """

    raw: list[bytes] = field(repr=False)
    indices: list[Index] = field(repr=False)
    places: dict[str, tuple[int, int]]

    @classmethod
    def own(cls, raw: bytes) -> Content:
        """Of what the store's own worker has written. Raises ValueError if the index is none."""
        index = Index.from_bytes(raw)
        return cls([raw], [index], {part.id: (part.offset, part.num_bytes) for part in index.layout.parts})

    @classmethod
    def received(cls, header: PushHeader) -> Content:
        """Of what a peer has pushed. Raises ValueError if an index is none."""
        raw = [text.encode() for text in json.loads(header.meta)]
        places = {part.id: (part.offset, part.nbytes) for part in header.parts}
        return cls(raw, [Index.from_bytes(one) for one in raw], places)

    def rank_indices(self) -> list[RankIndex]:
        """The indices as they are told to readers."""
        return [
            RankIndex(i.layout.rank, i.layout.world_size, tuple(part.id for part in i.layout.parts), raw)
            for i, raw in zip(self.indices, self.raw, strict=True)
        ]

    def checks(self, part: str) -> Iterable[tuple[int, int, str]]:
        """(offset in the part, length, digest) of every item of a part. Raises StoreError if no index describes it."""
        for index in self.indices:
            for layout in index.layout.parts:
                if layout.id == part:
                    return index.checks(layout)
        raise StoreError(f"No index describes part {part}.")

    def intact(self, part: str, buffer: np.ndarray) -> bool:
        """Whether a part's bytes in the buffer still have their digests. One without digests counts as intact."""
        start, size = self.places[part]
        return all(
            not expected
            or (offset + length <= size and digest(buffer[start + offset : start + offset + length]) == expected)
            for offset, length, expected in self.checks(part)
        )


def push_message(
    job: PushJob, source: str, pieces: Sequence[tuple[Content, np.ndarray, str]]
) -> tuple[PushHeader, list[memoryview]]:
    """What travels in a push: its header, with the indices of every rank involved, and the parts' bytes."""
    spans, digests, buffers, raw, offset = [], [], [], {}, 0
    for content, buffer, part in pieces:
        start, size = content.places[part]
        spans.append(PartSpan(id=part, offset=offset, nbytes=size))
        digests += [(offset + at, length, expected) for at, length, expected in content.checks(part) if expected]
        buffers.append(buffer.data[start : start + size])
        raw |= {index.layout.rank: text for index, text in zip(content.indices, content.raw, strict=True)}
        offset += size
    header = PushHeader(
        attempt=job.attempt,
        generation=str(job.generation),
        source=source,
        parts=tuple(spans),
        total_bytes=offset,
        meta=json.dumps([text.decode() for text in raw.values()]),
        digests=tuple(digests),
    )
    return header, buffers
