"""Shards of global arrays as boxes of index ranges, and the order of generations."""

from __future__ import annotations

import itertools
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
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes of one array share, or None if that is empty and neither of them is."""
    shared = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start > stop:
            return None
        shared.append((start, stop))
    both = tuple(shared)
    return None if volume(both) == 0 and volume(one) and volume(other) else both


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that select `inner` from an array holding exactly `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def row_span(inner: Box, outer: Box, itemsize: int) -> tuple[int, int, Box]:
    """The smallest contiguous run of a row-major buffer of `outer` that holds `inner`, cut along leading dimensions.

    Returns:
        Offset and length in bytes, and the box that those bytes are.
    """
    strides = _strides(outer, itemsize)
    offset, run = 0, list(outer)
    for axis, ((a, b), (c, _d)) in enumerate(zip(inner, outer, strict=True)):
        run[axis] = (a, b)
        offset += (a - c) * strides[axis]
        # Below an axis of more than one row the run must keep whole rows to stay contiguous.
        if b - a != 1:
            break
    span: Box = tuple(run)
    return offset, volume(span) * itemsize, span


def row_spans(inner: Box, outer: Box, itemsize: int, run_bytes: int) -> list[tuple[int, int, Box]]:
    """Contiguous runs of a row-major buffer of `outer` that together hold `inner`, as cheap as they can be.

    One run reads whole rows, needed or not; a run for each piece of a row reads no byte too many. In between, rows of
    the leading dimensions are read one by one and those below whole. That which costs least is chosen, where a run
    costs as much as `run_bytes` bytes: so what is read exceeds what is needed by at most `run_bytes` for each of the
    pieces that `inner` consists of.

    Returns:
        As `row_span`, for each run.
    """
    whole_runs = row_span(inner, outer, itemsize)
    cuts = [axis for axis, (have, want) in enumerate(zip(outer, inner, strict=True)) if have != want]
    if not cuts or whole_runs[1] == volume(inner) * itemsize:
        return [whole_runs]
    costs, rows = [], 1
    for depth in range(cuts[-1] + 1):
        read = rows * volume((inner[depth], *outer[depth + 1 :])) * itemsize
        costs.append((read + rows * run_bytes, depth))
        rows *= inner[depth][1] - inner[depth][0]
    depth = min(costs)[1]
    leading = itertools.product(*(range(start, stop) for start, stop in inner[:depth]))
    narrowed = (((*((i, i + 1) for i in row), *inner[depth:])) for row in leading)
    return [row_span(box, outer, itemsize) for box in narrowed]


def _strides(outer: Box, itemsize: int) -> list[int]:
    strides = [itemsize]
    for size in reversed(extent(outer)[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Whether boxes that are pairwise equal or disjoint (as shards are) together hold all of `target`."""
    shared = (intersect(box, target) for box in set(boxes))
    if volume(target) == 0:
        return any(box is not None for box in shared)
    return sum(volume(box) for box in shared if box is not None) == volume(target)
