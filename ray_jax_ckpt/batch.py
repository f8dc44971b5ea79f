"""Working memory that is used again for every batch of a restore."""

from __future__ import annotations

import mmap

import numpy as np

from ray_jax_ckpt.model.index import align


class BatchMemory:
    """Aligned memory that lives until `reset`, and then serves again. Not thread-safe.

    Touching fresh pages takes longer than filling old ones. And an allocator keeps what it gets back from many threads,
    so that a restore in batches would take as much memory as one without.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._used = 0
        self._wanted = 0

    def reset(self) -> None:
        """All that was taken is free. The next round gets one block as large as all of this one's together."""
        if len(self._blocks) > 1:
            self._wanted = sum(block.nbytes for block in self._blocks)
            self._blocks.clear()
        self._used = 0

    def take(self, nbytes: int) -> np.ndarray:
        """`nbytes` of uint8, aligned as views of any dtype and XLA's copies want it. The contents are arbitrary."""
        if not self._blocks or self._used + nbytes > self._blocks[-1].nbytes:
            size = max(align(nbytes), self._wanted, mmap.PAGESIZE)
            # Not from the heap: this goes back to the system with the last array over it.
            self._blocks.append(np.frombuffer(mmap.mmap(-1, size), np.uint8))
            self._used = self._wanted = 0
        start, self._used = self._used, align(self._used + nbytes)
        return self._blocks[-1][start : start + nbytes]
