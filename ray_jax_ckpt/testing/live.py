"""A run that is under way, seen from a test: its stores, its coordinator, and the copies that they hold."""

from __future__ import annotations

from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ray_jax_ckpt import _ray_compat
from ray_jax_ckpt.errors import SnapshotLostError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.arena import open_segment
from ray_jax_ckpt.memory.messages import Place, Probe
from ray_jax_ckpt.run_identity import run_identity

ANSWER_TIMEOUT_S = 30.0


class LiveRun:
    """The processes of a run of `JaxTrainer`, found by its name. The caller must be connected to its Ray cluster.

    Nothing is kept: each call asks the cluster again, since stores come and go.
    """

    def __init__(self, digest: str) -> None:
        """See `find_run`."""
        self._digest = digest

    def stores(self) -> dict[int, int]:
        """Process id of every rank's store, as far as they live and have been told of their group."""
        return {probe.rank: probe.pid for probe in self._probes().values() if probe.rank is not None}

    def coordinator(self) -> int:
        """Process id of the coordinator.

        Raises:
            ProcessLookupError: No store knows one that answers.
        """
        for probe in self._probes().values():
            if probe.coordinator is not None and (pid := _answer(probe.coordinator.pid.remote())) is not None:
                return pid
        raise ProcessLookupError(f"no coordinator of run {self._digest} answers")

    def held_steps(self, rank: int) -> set[int]:
        """Steps of which the store of a rank holds something."""
        return {generation.step for _, probe in self.probes(rank) for generation in probe.generations}

    def damage(self, rank: int, *, step: int | None = None, how: Literal["flip", "truncate"] = "flip") -> list[str]:
        """Damages what the store of a rank holds of a step, in place, as failing memory does. Nobody is told.

        Args:
            rank: The store's. The copies of its parts that other stores hold stay as they are.
            step: Which; None: the newest one that it holds.
            how: "flip" flips one bit of each part; "truncate" overwrites the second half of each with zeros.

        Returns:
            Ids of the damaged parts.

        Raises:
            SnapshotLostError: That store holds nothing of it.
        """
        for handle, probe in self.probes(rank):
            found = [generation for generation in probe.generations if step in (None, generation.step)]
            if found:
                view, _ = ray.get(handle.view.remote(max(found)), timeout=ANSWER_TIMEOUT_S)
                damaged = {part: place for part, place in view.places.items() if place.num_bytes}
                for place in damaged.values():
                    _damage(place, how)
                return sorted(damaged)
        raise SnapshotLostError(f"the store of rank {rank} holds nothing of step {'any' if step is None else step}")

    def probes(self, rank: int) -> list[tuple[Any, Probe]]:
        """Handle and state of every store that serves a rank, or has not heard yet that it does not any more."""
        handles = fleet.living_stores(self._digest)
        return [(handles[name], probe) for name, probe in self._probes().items() if probe.rank == rank]

    def _probes(self) -> dict[str, Probe]:
        refs = {name: handle.probe.remote() for name, handle in fleet.living_stores(self._digest).items()}
        answers = {name: _answer(ref) for name, ref in refs.items()}
        return {name: probe for name, probe in answers.items() if probe is not None}


def find_run(name: str, storage_path: str, storage_filesystem: Any = None) -> LiveRun:
    """A run by what its `RunConfig` says. It need not have started yet."""
    filesystem, path = _ray_compat.run_location(name, storage_path, storage_filesystem)
    return LiveRun(run_identity(filesystem, path).digest)


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=ANSWER_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        return None


def _damage(place: Place, how: str) -> None:
    with open_segment(place.segment, writable=True) as mapping:
        content = mapping.view()[place.offset : place.offset + place.num_bytes]
        if how == "flip":
            content[place.num_bytes // 3] ^= 0x10
        else:
            content[place.num_bytes // 2 :] = 0
        del content
