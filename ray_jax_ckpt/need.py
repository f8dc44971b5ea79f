"""What snapshots take of a node's memory, and whether it has that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ray_jax_ckpt.arrays.plan import Plan
from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import MemoryLimitError
from ray_jax_ckpt.memory.messages import Member
from ray_jax_ckpt.system import available_bytes

BUFFERS = 2


@dataclass(frozen=True)
class Need:
    """Of all stores and workers of a run on one node.

    Attributes:
        num_workers: Of the run on the node.
        own: Bytes of their shards, per generation.
        peer: Bytes of copies of peers' shards, per generation.
        persists: Whether one more buffer may be kept while it is written to storage.
    """

    num_workers: int
    own: int
    peer: int
    persists: bool

    @classmethod
    def of(
        cls, plan: Plan, ranks: Sequence[int], members: Iterable[Member], data_bytes: int, copies: int, persists: bool
    ) -> Need:
        """What the ranks of a node need; each one's `data` is taken to be as large as this process's."""
        own, peer = (sum(plan.stored[rank][side] for rank in ranks) for side in (0, 1))
        domains = len({member.domain for member in members})
        data = len(ranks) * data_bytes
        return cls(len(ranks), own + data, peer + data * (min(copies, domains) - 1), persists)

    @property
    def total(self) -> int:
        """Bytes: two buffers for all, a third one for what is being written, and one staging copy of the own shards."""
        return BUFFERS * (self.own + self.peer) + self.own * (1 + self.persists)

    def __str__(self) -> str:
        buffers = BUFFERS + self.persists
        return (
            f"Snapshots take {_gb(self.total)} on this node ({self.num_workers} "
            f"worker{'s' * (self.num_workers != 1)}): {buffers} x {_gb(self.own)} "
            f"of its own shards, {BUFFERS} x {_gb(self.peer)} of peers, {_gb(self.own)} of staging while one is copied"
        )

    def check(self, config: SnapshotConfig, held: int) -> None:
        """Raises MemoryLimitError if the node has not that much beside the `held` bytes that stores have already."""
        free = available_bytes()
        limits = {"max_bytes": config.max_bytes, "the node's free memory": None if free is None else free + held}
        for name, limit in limits.items():
            if limit is not None and self.total > limit:
                raise MemoryLimitError(
                    f"{self}; {name} allows {_gb(limit)}. Use fewer copies (now {config.copies}), more nodes, or a "
                    "larger SnapshotConfig.max_bytes."
                )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 5e7 else f"{num_bytes / 1e6:.3g} MB"
