"""Shards of global arrays as boxes of index ranges, and the order of generations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dimension, of a region of a global array. A scalar's box is `()`."""


@dataclass(frozen=True, order=True)
class Generation:
    """One step's state in one attempt. Ordering is age: by attempt, restores within it, step (never by step alone).

    Attributes:
        attempt: Which start of a worker group took it, counted from 1 over all drivers of the run.
        restores: How often that attempt had called `restore` before.
        step: The training step.
    """

    attempt: int
    restores: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.restores}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """The inverse of `str`. Raises ValueError for anything else."""
        attempt, restores, step = (int(field) for field in text.split("."))
        return cls(attempt, restores, step)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of a tuple of slices, as JAX's shardings give them, in an array of `shape`."""
    return tuple((part.indices(size)[0], part.indices(size)[1]) for part, size in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box of an entire array."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(extent(box))


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes of one array share, or None if that is empty and neither of them is."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    if any(start > stop for start, stop in shared):
        return None
    return None if volume(shared) == 0 and volume(one) and volume(other) else shared


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that select `inner` from an array holding exactly `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def row_span(inner: Box, outer: Box, itemsize: int) -> tuple[int, int, Box]:
    """The smallest contiguous run of a row-major buffer of `outer` that holds `inner`, cut along leading dimensions.

    Returns:
        Offset and length in bytes, and the box that those bytes are.
    """
    strides = [itemsize]
    for size in reversed(extent(outer)[1:]):
        strides.append(strides[-1] * size)
    strides.reverse()
    offset, run = 0, list(outer)
    for axis, ((a, b), (c, _d)) in enumerate(zip(inner, outer, strict=True)):
        run[axis] = (a, b)
        offset += (a - c) * strides[axis]
        # Below an axis of more than one row the run must keep whole rows to stay contiguous.
        if b - a != 1:
            break
    span: Box = tuple(run)
    return offset, volume(span) * itemsize, span


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Whether boxes that are pairwise equal or disjoint (as shards are) together hold all of `target`."""
    shared = (intersect(box, target) for box in set(boxes))
    if volume(target) == 0:
        return any(box is not None for box in shared)
    return sum(volume(box) for box in shared if box is not None) == volume(target)
