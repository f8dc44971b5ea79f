"""What a checkpoint on storage is to who restores it: indices as snapshots in memory have, and a way to the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import Want


class Source(Protocol):
    """An open checkpoint. A context manager; used by one thread."""

    @property
    def step(self) -> int | None:
        """The training step; None if nothing says it."""
        ...

    @property
    def metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Per rank."""
        ...

    def indices(self, template: Sequence[tuple[str, Sequence[Sequence[Any]], Any]] | None) -> Sequence[Index]:
        """One per rank of the group that wrote it.

        Args:
            template: Path, typed key path, and leaf of every leaf of the tree that is asked for. Some checkpoints do
                not say what kind of key a name was, or what kind of leaf a number; then it is what is asked for.
        """
        ...

    def fetch(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> Sequence[np.ndarray]:
        """One array per wanted box; see `ray_jax_ckpt.arrays.assemble.Fetch`. They are valid until the next call."""
        ...

    def __enter__(self) -> Source: ...
    def __exit__(self, *_: object) -> None: ...
