"""Text, as batches of bytes, from an iterator that knows its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 256
"""Number of tokens: one per byte value."""


def load_text() -> NDArray[np.uint8]:
    """Returns real English text and code that every Python installation carries: the language reference, ~700 KB."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


class TextBatches(Iterator[NDArray[np.int32]]):
    """Endless batches of text windows for one rank, in an order drawn anew for every epoch.

    Each window is shifted by a random offset, so epoch, position and random generator all matter: whoever loses one of
    them trains on other bytes.

    Args:
        text: The bytes to cut windows from, shape `[num_bytes]`.
        batch_size: Windows per batch, on this rank.
        length: Tokens the model reads per window; a window has one more, the last target.
        rank: Which of the `num_ranks` disjoint sets of windows is this one's.
        num_ranks: Number of ranks that share the text.
        seed: Same seed, same batches.

    Raises:
        ValueError: The text is too short for one batch per rank.
    """

    def __init__(
        self, text: NDArray[np.uint8], *, batch_size: int, length: int, rank: int = 0, num_ranks: int = 1, seed: int = 0
    ) -> None:
        num_windows = (len(text) - 1) // length - 1
        self._windows = np.arange(rank, num_windows, num_ranks)
        if len(self._windows) < batch_size:
            raise ValueError(f"{len(text)} bytes of text are too few for {num_ranks} ranks x {batch_size} x {length}")
        self._text, self._batch_size, self._length = text, batch_size, length
        self._rng = np.random.default_rng([seed, rank])
        self._epoch = 0
        self._start_epoch()

    def __next__(self) -> NDArray[np.int32]:
        """Returns the next batch, shape `[batch_size, length + 1]`."""
        if self._position + self._batch_size > len(self._order):
            self._epoch += 1
            self._start_epoch()
        windows = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        starts = windows * self._length + self._rng.integers(self._length, size=self._batch_size)
        return self._text[starts[:, None] + np.arange(self._length + 1)].astype(np.int32)

    def get_state(self) -> dict[str, Any]:
        """Returns all that decides the coming batches, as JSON-able values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rng_at_epoch_start": self._rng_at_epoch_start,
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called, on an iterator made with the same arguments."""
        self._epoch = state["epoch"]
        self._rng.bit_generator.state = state["rng_at_epoch_start"]
        self._start_epoch()
        self._position = state["position"]
        self._rng.bit_generator.state = state["rng"]

    def _start_epoch(self) -> None:
        self._rng_at_epoch_start = self._rng.bit_generator.state
        self._order = self._rng.permutation(self._windows)
        self._position = 0
