"""What is in a buffer of a store: indices, the places of parts, and how parts are checked and sent."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.memory.messages import RankIndex
from ray_jax_ckpt.memory.transfer import PartSpan, PushHeader
from ray_jax_ckpt.model.index import Index, PartLayout
from ray_jax_ckpt.model.pushes import PushJob

Check = tuple[int, int, str]
"""An item of a part: offset in the part, length, and digest ("" for none)."""


@dataclass
class Content:
    """What is in a held buffer.

    Attributes:
        raw: The encoded indices of the ranks it came from.
        indices: The same, decoded.
        places: Offset and size of each part that is here and good.
        checks: Of every part, what its bytes are compared with. For a part that was repaired they are another rank's
            than the index's.
        holes: Offset and size of each part that was found bad: room for a good copy.
    """

    raw: list[bytes] = field(repr=False)
    indices: list[Index] = field(repr=False)
    places: dict[str, tuple[int, int]]
    checks: dict[str, tuple[Check, ...]] = field(repr=False)
    holes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Told at every heartbeat, and of thousands of items.
        self._summaries = _summaries(self.checks)

    @classmethod
    def own(cls, raw: bytes, *, verify: bool) -> Content:
        """Of what the store's own worker has written.

        Raises:
            ValueError: The index is none, or (with `verify`) lacks a digest.
        """
        index = Index.from_bytes(raw)
        checks = {part.id: _checks(index, part) for part in index.layout.parts}
        places = {part.id: (part.offset, part.num_bytes) for part in index.layout.parts}
        return _checked(cls([raw], [index], places, checks), verify)

    @classmethod
    def received(cls, header: PushHeader, *, verify: bool) -> Content:
        """Of what a peer pushes: to be called before its bytes come.

        Raises:
            ValueError: An index is none, the parts are not those it describes, or (with `verify`) a digest is missing.
        """
        raw = [text.encode() for text in json.loads(header.meta)]
        indices = [Index.from_bytes(one) for one in raw]
        described = {part.id: (index, part) for index in reversed(indices) for part in index.layout.parts}
        digests = {(offset, length): text for offset, length, text in header.digests}
        checks, places, end = {}, {}, 0
        for span in header.parts:
            index, part = described.get(span.id, (None, None))
            if index is None or part is None or (span.offset, span.nbytes) != (end, part.num_bytes):
                raise ValueError(f"part {span.id} of {span.nbytes} bytes at {span.offset} is not as its index says")
            spots = [(offset, length) for offset, length, _ in _checks(index, part)]
            checks[span.id] = tuple((at, length, digests.get((end + at, length), "")) for at, length in spots)
            places[span.id] = (end, span.nbytes)
            end += span.nbytes
        if end != header.total_bytes:
            raise ValueError(f"parts of {end} bytes in a push of {header.total_bytes} bytes")
        return _checked(cls(raw, indices, places, checks), verify)

    def adopt(self, raw: bytes) -> None:
        """Takes in the index of a rank that has nothing but an empty host part. Raises ValueError if it is none."""
        index = Index.from_bytes(raw)
        if index.layout.rank not in {known.layout.rank for known in self.indices}:
            self.raw.append(raw)
            self.indices.append(index)
            self.places |= {part.id: (0, 0) for part in index.layout.parts}
            self.checks |= {part.id: () for part in index.layout.parts}
            self._summaries = _summaries(self.checks)

    def rank_indices(self) -> list[RankIndex]:
        """The indices as they are told to readers."""
        return [
            RankIndex(i.layout.rank, i.layout.world_size, tuple(part.id for part in i.layout.parts), raw)
            for i, raw in zip(self.indices, self.raw, strict=True)
        ]

    def intact(self, part: str, buffer: np.ndarray) -> bool:
        """Whether a part's bytes in the buffer still have their digests. What has no digest cannot be said to be."""
        place = self.places.get(part)
        return place is not None and all(_matches(buffer[place[0] :][: place[1]], check) for check in self.checks[part])

    def drop(self, parts: Iterable[str]) -> None:
        """These are bad: they are not served any more, and may be repaired."""
        for part in parts:
            if part in self.places:
                self.holes[part] = self.places.pop(part)

    def repair(self, part: str, checks: tuple[Check, ...]) -> None:
        """A hole has been filled with bytes that passed these checks."""
        self.places[part], self.checks[part] = self.holes.pop(part), checks
        self._summaries = _summaries(self.checks)

    def digests(self) -> Mapping[str, str]:
        """One digest for each part that is here and completely digested."""
        return {part: text for part, text in self._summaries.items() if part in self.places}

    @functools.cached_property
    def claims(self) -> Mapping[str, tuple[int, str]]:
        """What ranks have captured by their own indices: of several that describe a part, the lowest rank counts."""
        claims: dict[str, tuple[int, str]] = {}
        for index in sorted(self.indices, key=lambda one: -one.layout.rank):
            found = _summaries({part.id: _checks(index, part) for part in index.layout.parts})
            claims |= {part: (index.layout.rank, text) for part, text in found.items()}
        return claims


def push_message(
    job: PushJob, source: str, pieces: Sequence[tuple[Content, np.ndarray, str]]
) -> tuple[PushHeader, list[memoryview]]:
    """What travels in a push: its header, with the indices of every rank involved, and the parts' bytes."""
    spans, digests, buffers, raw, offset = [], [], [], {}, 0
    for content, buffer, part in pieces:
        start, size = content.places[part]
        spans.append(PartSpan(id=part, offset=offset, nbytes=size))
        digests += [(offset + at, length, expected) for at, length, expected in content.checks[part] if expected]
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


def _checks(index: Index, part: PartLayout) -> tuple[Check, ...]:
    given = index.digests.get(part.id, ())
    if len(given) != len(part.items):
        raise ValueError(f"{len(given)} digests for {len(part.items)} items of part {part.id}")
    return tuple(index.checks(part))


def _checked(content: Content, verify: bool) -> Content:
    """Raises IntegrityError if something could not be verified that is to be, now or ever after."""
    bare = sorted(part for part, checks in content.checks.items() if not all(text for *_, text in checks))
    if verify and bare:
        raise IntegrityError(f"items without a digest in parts {bare[:5]}, which cannot be verified")
    return content


def _matches(data: np.ndarray, check: Check) -> bool:
    offset, length, expected = check
    return bool(expected) and offset + length <= data.nbytes and digest(data[offset : offset + length]) == expected


def _summaries(checks: Mapping[str, Sequence[Check]]) -> dict[str, str]:
    digests = {part: [text for *_, text in found] for part, found in checks.items()}
    return {part: digest("\n".join(texts).encode()) for part, texts in digests.items() if all(texts)}
