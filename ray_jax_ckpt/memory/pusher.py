"""Sends a store's parts to its peers: in order per peer, in the background, with retries."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ray_jax_ckpt.errors import SnapshotLostError, StaleAttemptError
from ray_jax_ckpt.model.shards import Generation

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 1.0, 5.0)


@dataclass(frozen=True)
class PushJob:
    """Parts of a generation to be copied to a peer.

    Attributes:
        generation: Which.
        parts: Their ids.
        attempt: On whose behalf.
        lane: Jobs of one lane run one after the other, in the order they came. One lane per receiver.
        rank: The receiver's rank in the attempt's group, when name and address are to be looked up when it is sent.
        target: The receiver's name and Flight address otherwise.
        source: What the receiver knows the sender as; "" for its name.
    """

    generation: Generation
    parts: tuple[str, ...]
    attempt: int
    lane: str
    rank: int | None = None
    target: tuple[str, str] | None = None
    source: str = ""


class Pusher:
    """Queues of pushes, a daemon thread per lane. Thread-safe."""

    def __init__(self, send: Callable[[PushJob], None]) -> None:
        """`send` performs a push and blocks until it is verified, or raises. It runs in a lane's thread."""
        self._send = send
        self._changed = threading.Condition()
        self._lanes: dict[str, deque[PushJob]] = {}
        self._forgotten: deque[Generation] = deque(maxlen=64)

    def enqueue(self, job: PushJob) -> None:
        """Adds a job at the end of its lane. Returns at once."""
        with self._changed:
            lane = self._lanes.get(job.lane)
            if lane is None:
                lane = self._lanes[job.lane] = deque()
                threading.Thread(target=self._run, args=(lane,), name=f"push to {job.lane}", daemon=True).start()
            lane.append(job)
            self._changed.notify_all()

    def forget(self, generations: Iterable[Generation]) -> None:
        """Pushes of these that have not begun are passed over, and not retried."""
        with self._changed:
            self._forgotten.extend(generations)
            self._changed.notify_all()

    def _run(self, lane: deque[PushJob]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: lane)
                job = lane.popleft()
            try:
                self._attempt(job)
            except Exception:
                logger.exception("Push of generation %s to %s failed.", job.generation, job.lane)

    def _attempt(self, job: PushJob) -> None:
        """Tries a job until it is done, pointless, or out of tries. An error here must not end the lane."""
        for delay in (*RETRY_DELAYS_S, None):
            with self._changed:
                if job.generation in self._forgotten:
                    return
            try:
                return self._send(job)
            except (StaleAttemptError, SnapshotLostError) as error:
                logger.debug("Push of generation %s dropped: %s", job.generation, error)
                return
            except Exception as error:
                if delay is None:
                    logger.warning(
                        "Step %d could not be copied to %s and stays with fewer copies: %s",
                        job.generation.step,
                        job.lane,
                        error,
                    )
                    return
                logger.info("Push of generation %s to %s failed, trying again: %s", job.generation, job.lane, error)
            with self._changed:
                self._changed.wait_for(lambda: job.generation in self._forgotten, delay)
