"""The background half of a snapshot in a worker: from pinned host memory into the store."""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_jax_ckpt.arrays.finite import check_finite
from ray_jax_ckpt.arrays.plan import Captured
from ray_jax_ckpt.data_state import DataCapture, DataRoom, write_blobs
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.errors import CheckpointError, SnapshotError, SnapshotTimeoutError, StoreError
from ray_jax_ckpt.memory.arena import Mapping, open_segment
from ray_jax_ckpt.memory.messages import Grant
from ray_jax_ckpt.memory.store import writer_identity
from ray_jax_ckpt.metrics import stored
from ray_jax_ckpt.model.index import Index, Layout
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults

logger = logging.getLogger(__name__)

# A store's bounded wait ends by itself; this much later the store is taken to be gone.
GRACE_S = 5.0
# Segments stay mapped, since mapping 1 GB again costs as much as copying it. A store gives a source the same ones
# again; more than it can have in use would keep memory alive that the store has dropped.
MAX_MAPPINGS = 2

Result = TypeVar("Result")


@dataclass
class Job:
    """A captured state on its way to the store."""

    generation: Generation
    captured: Captured
    data: DataCapture
    metrics: dict[str, Any]
    placed: tuple[Layout, list[int]] | None = None
    grant: Grant | None = None
    lease: Lease | None = None
    started: float = field(default_factory=time.monotonic)


class Pipeline:
    """Stores one captured state at a time in a daemon thread.

    Args:
        store: The rank's store.
        replace_store: Returns a new store when the old one died.
        room: For what of `data` does not fit into the index.
        attempt: The group's.
        where: Rank and node, as warnings name them.
        verify: Whether items are digested.
        reject_nonfinite: Whether a state with NaN or infinity in it fails.
        timeout_s: Bound of the wait for a buffer.
        failed: Told of a generation that could not be stored, and why.
        began: Told of every job when its turn has come.
    """

    def __init__(
        self,
        store: ActorHandle,
        replace_store: Callable[[], ActorHandle],
        room: DataRoom,
        *,
        attempt: int,
        where: str,
        verify: bool,
        reject_nonfinite: bool,
        timeout_s: float,
        failed: Callable[[Generation, str], None],
        began: Callable[[Generation, Layout], None],
    ) -> None:
        self._store, self._replace_store, self._room = store, replace_store, room
        self._attempt, self._timeout_s, self._failed, self._began = attempt, timeout_s, failed, began
        self._where, self._verify, self._reject_nonfinite = where, verify, reject_nonfinite
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

    def reserve(self, job: Job, lease: Lease, timeout_s: float) -> None:
        """Gets a leased buffer for a job now, in the calling thread.

        Raises:
            CheckpointError: There is none in time, or the store refused.
        """
        job.lease = lease
        self._place(job)
        job.grant = self._with_store(lambda: self._begin(job, timeout_s))

    def lease(self, lease: Lease, timeout_s: float) -> None:
        """Keeps what is stored already. Raises SnapshotError if it is not there any more."""
        try:
            self._with_store(lambda: ray.get(self._store.lease.remote(lease), timeout=timeout_s + GRACE_S))
        except StoreError as error:
            raise SnapshotError(f"Step {lease.generation.step} cannot be kept: {error}") from error

    def unlease(self, lease_id: str) -> None:
        """Ends a lease; returns at once, and never raises."""
        # A handle may be collected when there is no cluster any more, and Ray would start one for the call. The lease
        # has ended with its attempt.
        if not ray.is_initialized():
            return
        try:
            self._store.unlease.remote(lease_id)
        except Exception as error:
            logger.debug("Lease %s could not be ended: %r", lease_id, error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None)
                job = self._job
            assert job is not None
            error = self._attempt_job(job)
            if error is not None:
                self._report(job, error)
                # An error that is kept must not keep a copy of the state in its frames.
                traceback.clear_frames(error.__traceback__)
            staging = job.captured.plan.staging
            del job.captured
            with self._changed:
                self._job, self._error = None, error
                self._changed.notify_all()
            # Seconds, once per tree structure: after the first snapshot, since the training thread must not wait.
            staging.compile()

    def _attempt_job(self, job: Job) -> BaseException | None:
        """Stores a job. Never raises: the thread must go on."""
        try:
            self._began(job.generation, job.captured.plan.layout)
            self._place(job)
            self._with_store(lambda: self._store_job(job))
        except Exception as error:
            return error
        return None

    def _place(self, job: Job) -> tuple[Layout, list[int]]:
        """Where everything goes: known when the process's `data` is complete, once for each job."""
        if job.placed is None:
            job.data.finish()
            job.placed = self._room.place(job.captured.plan.layout, job.data.blobs)
        return job.placed

    def _with_store(self, action: Callable[[], Result]) -> Result:
        """Performs an action, once more with a new store if the first one died. Raises what the store raised."""
        try:
            try:
                return action()
            except RayActorError as error:
                logger.warning("The store of this rank is gone (%s); starting a new one.", error)
                self._store = self._replace_store()
                return action()
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, CheckpointError) else SnapshotError(str(error))) from None
        except RayError as error:
            raise SnapshotError(f"The store of this rank cannot be reached: {error}") from error

    def _report(self, job: Job, error: BaseException) -> None:
        elapsed, step = time.monotonic() - job.started, job.generation.step
        text = f"The snapshot of step {step} failed on {self._where} after {elapsed:.1f} s, training goes on: {error!r}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:
            # Where warnings are errors this one would end the thread, and nobody would see it.
            logger.warning(text)
        try:
            self._failed(job.generation, repr(error))
        except Exception as second:
            logger.warning("Nobody could be told that step %d failed: %r", step, second)

    def _begin(self, job: Job, timeout_s: float) -> Grant:
        """A buffer for a job, leased if the job is to be kept."""
        store, num_bytes = self._store, self._place(job)[0].num_bytes
        ref = store.begin.remote(self._attempt, job.generation, num_bytes, self._writer, timeout_s)
        try:
            grant: Any = ray.get(ref, timeout=timeout_s + GRACE_S)
            if job.lease is not None:
                ray.get(store.lease.remote(job.lease), timeout=timeout_s + GRACE_S)
        except GetTimeoutError:
            raise SnapshotTimeoutError(
                f"The store of this rank did not answer within {timeout_s + GRACE_S:g} s when step "
                f"{job.generation.step} was to be stored. It, or its node, hangs; raise timeout_s if it is only slow."
            ) from None
        return grant

    def _store_job(self, job: Job) -> None:
        # A grant of a store that died since is of no use for the next one.
        grant, job.grant = job.grant or self._begin(job, self._timeout_s), None
        try:
            buffer, (layout, offsets) = self._mapping(grant).view(), self._place(job)
            faults.reach("grant", job.generation.step)
            copy = functools.partial(self._copy_item, job.generation.step)
            digests = job.captured.write(buffer, copy)
            blobs = write_blobs(buffer, layout, job.data.blobs, offsets, copy)
            faults.reach("commit", job.generation.step)
            values, data = job.captured.values, job.data.encoded
            if self._reject_nonfinite:
                # Before the commit: what is complete can be restored.
                check_finite(layout, buffer, values)
            index = Index(job.generation, layout, digests, values, data, _plain(job), blobs)
            ref = self._store.commit.remote(self._attempt, grant.slot, index.to_bytes())
            ray.get(ref, timeout=self._timeout_s + GRACE_S)
        except BaseException:
            self._store.cancel.remote(grant.slot)
            raise

    def _copy_item(self, step: int, target: np.ndarray, source: np.ndarray) -> str:
        digest = copy_and_digest(target, source, self._verify)
        faults.reach("copy", step)
        return digest

    def _mapping(self, grant: Grant) -> Mapping:
        found = self._mappings.pop(grant.segment.id, None)
        if found is None:
            try:
                found = open_segment(grant.segment, writable=True)
            except StoreError:
                # Raises RayActorError if the store died since it granted the buffer: then a new one takes the job.
                ray.get(self._store.pid.remote(), timeout=GRACE_S)
                raise
        self._mappings[grant.segment.id] = found
        while len(self._mappings) > MAX_MAPPINGS:
            self._mappings.pop(next(iter(self._mappings))).close()
        return found


def _plain(job: Job) -> dict[str, Any]:
    """The metrics, fetched from the devices. What cannot be is left out: it must not cost the snapshot."""
    plain = {}
    # A copy: the training thread may add some meanwhile.
    for name, value in dict(job.metrics).items():
        try:
            plain |= stored({name: value})
        except Exception as error:
            logger.warning("Metric %r of step %d is left out, it cannot be had: %r", name, job.generation.step, error)
    return plain
