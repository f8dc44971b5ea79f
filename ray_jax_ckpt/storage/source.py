"""What a checkpoint on storage is to who restores it: indices as snapshots in memory have, and a way to the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np

from ray_jax_ckpt.batch import BatchMemory
from ray_jax_ckpt.errors import RestoreError
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.recovery import Want
from ray_jax_ckpt.model.shards import extent, volume


class Source(Protocol):
    """An open checkpoint. A context manager; used by one thread."""

    @property
    def step(self) -> int | None:
        """The training step; None if nothing says it."""
        ...

    @property
    def metrics(self) -> Mapping[int, Mapping[str, Any]]:
        """Per rank."""
        ...

    @property
    def sharded(self) -> frozenset[int]:
        """Leaves that are known to have been spread over several devices."""
        ...

    def indices(self, template: Sequence[tuple[str, Sequence[Sequence[Any]], Any]] | None) -> Sequence[Index]:
        """One per rank of the group that wrote it. Each tells of everything that is no rank's own.

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


class Landings:
    """Memory for what is fetched, used again by each `fetch`. Not thread-safe.

    Args:
        where: The checkpoint, for messages.
        available_bytes: What this process can take; None: not known.
    """

    def __init__(self, where: str, available_bytes: int | None) -> None:
        self._where, self._available_bytes, self._memory = where, available_bytes, BatchMemory()

    def take(self, wants: Sequence[Want], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """An array for each wanted box, valid until the next call.

        Raises:
            RestoreError: There is not enough memory: what is asked for is too much, or a forged shape.
        """
        total = sum(volume(want.box) * dtype.itemsize for want, dtype in zip(wants, dtypes, strict=True))
        if self._available_bytes is not None and total > self._available_bytes:
            raise RestoreError(
                f"{self._where} has arrays of {total} bytes that are read at a time, and this process can take "
                f"{self._available_bytes}. Restore fewer leaves (partial=True), or shard them over more processes."
            )
        self._memory.reset()
        return [
            self._memory.take(volume(want.box) * dtype.itemsize).view(dtype).reshape(extent(want.box))
            for want, dtype in zip(wants, dtypes, strict=True)
        ]


class RankIndices(Sequence[Index]):
    """One index per rank. In a large group each is of a small file, and a rank that restores needs its own.

    Args:
        count: How many there are.
        make: Those of some ranks, several of which are read at a time. Raises what reading raises.
    """

    def __init__(self, count: int, make: Callable[[Sequence[int]], Mapping[int, Index]]) -> None:
        self._count, self._make = count, make
        self._made: dict[int, Index] = {}

    def some(self, ranks: Iterable[int]) -> list[Index]:
        """Those of some ranks."""
        wanted = list(ranks)
        if missing := [rank for rank in wanted if rank not in self._made]:
            self._made.update(self._make(missing))
        return [self._made[rank] for rank in wanted]

    @overload
    def __getitem__(self, at: int) -> Index: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Index]: ...
    def __getitem__(self, at: Any) -> Any:
        found = range(self._count)[at]
        return self.some([found])[0] if isinstance(found, int) else self.some(found)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Index]:
        return iter(self.some(range(self._count)))
