"""The background half of a snapshot in a worker: from pinned host memory into the store."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ray_jax_ckpt.arrays.plan import Captured
from ray_jax_ckpt.errors import CheckpointError, SnapshotError, SnapshotTimeoutError
from ray_jax_ckpt.memory.arena import Mapping, open_segment
from ray_jax_ckpt.memory.digest import copy_and_digest
from ray_jax_ckpt.memory.messages import Grant
from ray_jax_ckpt.memory.store import writer_identity
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease

logger = logging.getLogger(__name__)

# A store's bounded wait ends by itself; this much later the store is taken to be gone.
GRACE_S = 5.0
# Segments stay mapped, since mapping 1 GB again costs as much as copying it. A store gives a source the same ones
# again; more than it can have in use would keep memory alive that the store has dropped.
MAX_MAPPINGS = 2


@dataclass
class Job:
    """A captured state on its way to the store."""

    generation: Generation
    captured: Captured
    data: Any
    metrics: dict[str, Any]
    lease: Lease | None = None
    grant: Grant | None = None
    started: float = field(default_factory=time.monotonic)


class Pipeline:
    """Stores one captured state at a time in a daemon thread.

    Args:
        store: The rank's store.
        replace_store: Returns a new store when the old one died.
        attempt: The group's.
        verify: Whether items are digested.
        timeout_s: Bound of the wait for a buffer.
        failed: Told of a generation that could not be stored, and why.
    """

    def __init__(
        self,
        store: ActorHandle,
        replace_store: Callable[[], ActorHandle],
        *,
        attempt: int,
        verify: bool,
        timeout_s: float,
        failed: Callable[[Generation, str], None],
    ) -> None:
        self._store, self._replace_store = store, replace_store
        self._attempt, self._timeout_s, self._failed = attempt, timeout_s, failed
        self._copy = functools.partial(copy_and_digest, verify=verify)
        self._writer = writer_identity()
        self._mappings: dict[str, Mapping] = {}
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def idle(self, timeout_s: float) -> bool:
        """Waits until nothing is under way, at most `timeout_s` (0: just looks)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout_s)

    def submit(self, job: Job) -> None:
        """Hands over a job; the pipeline must be idle."""
        with self._changed:
            assert self._job is None
            self._job, self._error = job, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rjc-snapshot", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Waits until what was submitted is stored.

        Raises:
            SnapshotTimeoutError: It takes longer.
            SnapshotError: The last job failed.
        """
        if not self.idle(timeout_s):
            job = self._job
            step = job.generation.step if job else "?"
            raise SnapshotTimeoutError(f"Step {step} was not stored within {timeout_s:g} s; raise timeout_s.")
        error = self._error
        if error is not None:
            raise SnapshotError(f"The last snapshot failed: {error}") from error

    def reserve(self, generation: Generation, num_bytes: int, lease: Lease, timeout_s: float) -> Grant:
        """Gets a leased buffer now, in the calling thread. Raises what the store raises."""
        grant = self._begin(generation, num_bytes, timeout_s)
        ray.get(self._store.lease.remote(lease), timeout=timeout_s + GRACE_S)
        return grant

    def unlease(self, lease_id: str) -> None:
        """Ends a lease; returns at once."""
        self._store.unlease.remote(lease_id)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None)
                job = self._job
            assert job is not None
            error = self._attempt_job(job)
            if error is not None:
                self._report(job, error)
            del job.captured
            with self._changed:
                self._job, self._error = None, error
                self._changed.notify_all()

    def _attempt_job(self, job: Job) -> BaseException | None:
        """Stores a job, once more with a new store if the first one died. Never raises: the thread must go on."""
        try:
            try:
                self._store_job(job)
            except RayActorError as error:
                logger.warning("The store of this rank is gone (%s); starting a new one.", error)
                self._store, job.grant = self._replace_store(), None
                self._store_job(job)
        except RayTaskError as error:
            return error.cause if isinstance(error.cause, CheckpointError) else error
        except Exception as error:
            return error
        return None

    def _report(self, job: Job, error: BaseException) -> None:
        elapsed = time.monotonic() - job.started
        step = job.generation.step
        warnings.warn(
            f"The snapshot of step {step} failed after {elapsed:.1f} s, training goes on: {error!r}",
            RuntimeWarning,
            stacklevel=1,
        )
        try:
            self._failed(job.generation, repr(error))
        except Exception as second:
            logger.warning("Nobody could be told that step %d failed: %r", step, second)

    def _begin(self, generation: Generation, num_bytes: int, timeout_s: float) -> Grant:
        ref: Any = self._store.begin.remote(self._attempt, generation, num_bytes, self._writer, timeout_s)
        try:
            return ray.get(ref, timeout=timeout_s + GRACE_S)
        except GetTimeoutError:
            raise SnapshotTimeoutError(
                f"The store of this rank did not answer within {timeout_s + GRACE_S:g} s when step {generation.step} "
                f"was to be "
                "stored. It, or its node, hangs; raise timeout_s if it is only slow."
            ) from None

    def _store_job(self, job: Job) -> None:
        layout = job.captured.plan.layout
        grant = job.grant or self._begin(job.generation, layout.num_bytes, self._timeout_s)
        try:
            mapping = self._mapping(grant)
            job.captured.wait()
            digests = job.captured.write(mapping.view(), self._copy)
            metrics = {name: _number(value) for name, value in job.metrics.items()}
            index = Index(job.generation, layout, digests, job.captured.values, job.data, metrics)
            ref = self._store.commit.remote(self._attempt, grant.slot, index.to_bytes())
            ray.get(ref, timeout=self._timeout_s + GRACE_S)
        except BaseException:
            self._store.cancel.remote(grant.slot)
            raise

    def _mapping(self, grant: Grant) -> Mapping:
        found = self._mappings.pop(grant.segment.id, None)
        if found is None:
            found = open_segment(grant.segment, writable=True)
        self._mappings[grant.segment.id] = found
        while len(self._mappings) > MAX_MAPPINGS:
            self._mappings.pop(next(iter(self._mappings))).close()
        return found


def _number(value: Any) -> float:
    return float(value)
