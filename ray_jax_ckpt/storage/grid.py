"""The regular grid of chunks that a leaf is stored in: one file per chunk, as zarr names them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from ray_jax_ckpt.model.shards import Box

DATABASE_CHUNK_BYTES = 32 << 20
"""Largest chunk in an OCDBT database: it is in memory whole, more than once, while the database is made."""


def chunk_shape(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, ...]:
    """The largest chunks of which every box is made up, so that all are full.

    Args:
        shape: Of the array.
        boxes: All that it is cut into. Usually each is one chunk.

    Returns:
        At least 1 per axis, also where the array has no elements: zarr wants it so.
    """
    steps = list(shape)
    for box in boxes:
        steps = [math.gcd(step, *side) for step, side in zip(steps, box, strict=True)]
    return tuple(max(1, step) for step in steps)


def split(chunks: Sequence[int], itemsize: int, limit_bytes: int) -> tuple[int, ...]:
    """Chunks of at most `limit_bytes` that these are made up of, cut along leading axes first."""
    shape, size = list(chunks), itemsize * math.prod(chunks)
    for axis, length in enumerate(shape):
        if size <= limit_bytes:
            break
        needed = -(-size // limit_bytes)
        parts = next(n for n in range(min(needed, length), length + 1) if length % n == 0)
        shape[axis], size = length // parts, size // parts
    return tuple(shape)


def grid_shape(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """How many chunks there are per axis."""
    return tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))


def num_chunks(shape: Sequence[int], chunks: Sequence[int]) -> int:
    """How many chunks there are: none if the array has no elements, one if it has no dimensions."""
    return math.prod(grid_shape(shape, chunks))


def chunk_key(position: Sequence[int]) -> str:
    """Name of a chunk's file, below the array's directory: "c/0/1", and "c" of an array without dimensions."""
    return "/".join(["c", *map(str, position)])


def chunks_of(box: Box, chunks: Sequence[int]) -> Iterator[tuple[str, Box]]:
    """Key and box of each chunk that a box is made up of. The box's edges have to be on the grid."""
    ranges = [range(start // step, -(-stop // step)) for (start, stop), step in zip(box, chunks, strict=True)]
    for position in itertools.product(*ranges):
        yield (
            chunk_key(position),
            tuple((at * step, (at + 1) * step) for at, step in zip(position, chunks, strict=True)),
        )
