"""The `data` of the ranks of the group that wrote a checkpoint: read when somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ray_jax_ckpt.arrays.assemble import Fetch
from ray_jax_ckpt.data_state import decode_states
from ray_jax_ckpt.model.index import Index


class RankData(Mapping[int, Any]):
    """Every rank's `data` by rank; None where a rank gave none. Thread-safe; pickled as a dictionary.

    Whoever goes through it reads that of all ranks, several at a time. Asking for one rank's reads that.
    """

    def __init__(self, indices: Sequence[Index], fetch: Fetch) -> None:
        self._indices, self._fetch = indices, fetch
        self._lock = threading.Lock()
        self._known: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in range(len(self)):
            raise KeyError(rank)
        return self._read([rank])[rank]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._read(range(len(self))))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _read(self, ranks: Sequence[int]) -> Mapping[int, Any]:
        with self._lock:
            if missing := [rank for rank in ranks if rank not in self._known]:
                found = self._indices[:] if len(missing) == len(self) else [self._indices[rank] for rank in missing]
                self._known.update(decode_states(found, self._fetch))
            return {rank: self._known[rank] for rank in ranks}
