"""Sends a store's parts to its peers: in order per peer, in the background, with retries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ray_jax_ckpt.errors import AlreadyHeldError, SnapshotLostError, StaleAttemptError
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model.pushes import PushJob, Queue
from ray_jax_ckpt.model.shards import Generation

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 1.0, 5.0)


class Pusher:
    """Queues of pushes, a daemon thread per lane. Thread-safe."""

    def __init__(self, send: Callable[[PushJob], None]) -> None:
        """`send` performs a push and blocks until it is verified, or raises. It runs in a lane's thread."""
        self._send = send
        self._changed = threading.Condition()
        self._queue = Queue()
        self._news = 0
        self._lanes: set[str] = set()

    def enqueue(self, job: PushJob) -> None:
        """Adds a job at the end of its lane. Returns at once."""
        with self._changed:
            self._queue = pushes.enqueue(self._queue, job)
            if job.lane not in self._lanes:
                self._lanes.add(job.lane)
                threading.Thread(target=self._run, args=(job.lane,), name=f"push to {job.lane}", daemon=True).start()
            self._changed.notify_all()

    def forget(self, generations: Iterable[Generation]) -> None:
        """Pushes of these that have not begun are passed over, and not retried."""
        with self._changed:
            self._queue = pushes.forget(self._queue, generations)
            self._changed.notify_all()

    def try_again(self) -> None:
        """Receivers may have been replaced: pushes that wait for their next try are tried now, as if they were new."""
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def _run(self, lane: str) -> None:
        while True:
            job = self._take(lane)
            try:
                self._attempt(job)
            except Exception:
                logger.exception("Push of generation %s to %s failed.", job.generation, job.lane)

    def _take(self, lane: str) -> PushJob:
        with self._changed:
            while True:
                self._queue, job = pushes.take(self._queue, lane)
                if job is not None:
                    return job
                self._changed.wait()

    def _attempt(self, job: PushJob) -> None:
        """Tries a job until it is done, pointless, or out of tries. An error here must not end the lane."""
        delays = iter(RETRY_DELAYS_S)
        while True:
            with self._changed:
                news = self._news
                if job.generation in self._queue.forgotten:
                    return
            try:
                return self._send(job)
            except (StaleAttemptError, SnapshotLostError, AlreadyHeldError) as error:
                logger.debug("Push of generation %s dropped: %s", job.generation, error)
                return
            except Exception as error:
                delay = next(delays, None)
                if delay is None:
                    logger.warning(
                        "Step %d could not be copied to %s and stays with fewer copies: %s",
                        job.generation.step,
                        job.lane,
                        error,
                    )
                    return
                logger.info("Push of generation %s to %s failed, trying again: %s", job.generation, job.lane, error)
            if self._pause(job, delay, news):
                delays = iter(RETRY_DELAYS_S)

    def _pause(self, job: PushJob, delay_s: float, news: int) -> bool:
        """Waits before the next try; whether there is news of receivers since."""
        with self._changed:
            self._changed.wait_for(lambda: job.generation in self._queue.forgotten or self._news != news, delay_s)
            return self._news != news
