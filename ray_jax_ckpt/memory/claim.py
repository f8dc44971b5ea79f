"""One driver per run: its coordinator has a name, and who finds that taken by a living driver is refused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from ray_jax_ckpt.errors import RunInUseError
from ray_jax_ckpt.memory.fleet import NAMESPACE

logger = logging.getLogger(__name__)

# A driver that was killed may seem alive for a moment: Ray has to notice. Killed with its node, for longer.
ASSURANCE_S = 4.0
PATIENCE_S = 40.0
POLL_S = 0.25
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class DriverIdentity:
    """Who trains a run.

    Attributes:
        host: Name of the machine.
        pid: Process id of the driver.
        job: Ray's id of its job.
        started_at_s: Unix time at which it began to train the run.
    """

    host: str
    pid: int
    job: str
    started_at_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_at_s))
        return f"process {self.pid} on {self.host} (Ray job {self.job}), since {since}"


@dataclass(frozen=True)
class Incumbent:
    """A run's driver, as its coordinator knows it.

    Attributes:
        driver: Who that is; None: it did not say.
        answers: Whether its controller has just answered. One that waits for resources, or for workers, does not.
    """

    driver: DriverIdentity | None
    answers: bool


def coordinator_name(run: str) -> str:
    """Name of a run's coordinator, while a driver trains it. It is none of a store's."""
    return f"coordinator:{run}"


def this_controller() -> ActorHandle | None:
    """The actor that calls this; None in a driver."""
    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError:
        return None


async def incumbent(driver: DriverIdentity | None, controller: ActorHandle | None) -> Incumbent:
    """What a coordinator says of its driver."""
    if controller is None:
        return Incumbent(driver, False)
    ready: Any = controller.__ray_ready__
    try:
        await asyncio.wait_for(ready.remote(), ANSWER_TIMEOUT_S / 2)
    except (RayError, TimeoutError):
        return Incumbent(driver, False)
    return Incumbent(driver, True)


def claim(run: str, start: Callable[[], ActorHandle], *, called: str, patience_s: float = PATIENCE_S) -> ActorHandle:
    """Starts a run's coordinator under its name. Returns at once unless the name is taken; then blocks for a while.

    One whose driver is dying gives the name up. One that says nothing for all of `patience_s` is ended: what it might
    still do is refused by the stores as of an earlier attempt.

    Args:
        run: Digest of the run.
        start: Starts the coordinator; raises ValueError while the name is taken.
        called: The run, in words.
        patience_s: How long a driver that may be dead is waited for.

    Raises:
        RunInUseError: Another driver lives and trains this run.
    """
    begun, answered_at_s, lost = time.monotonic(), None, False
    while True:
        try:
            return start()
        except ValueError as error:
            taken = error
        known = _find(run)
        heard = _ask(known) if known is not None else None
        now = time.monotonic()
        late = now - begun > patience_s
        if heard is not None and heard.answers:
            answered_at_s = answered_at_s or now
            late = now - answered_at_s > ASSURANCE_S
        # Who is not found has most often just given the name up.
        if late and (known is not None or lost):
            _decide(called, known, heard, taken)
        lost = known is None
        time.sleep(POLL_S)


def _decide(called: str, known: ActorHandle | None, heard: Incumbent | None, taken: ValueError) -> None:
    """It has been waited for long enough."""
    if heard is not None:
        raise RunInUseError(
            f"{called} is being trained already, by {heard.driver or 'another driver'}. Two drivers would "
            "replace each other's snapshots. Wait until it has ended, or end it: started again after that, this driver "
            "goes on from what it has left in memory and on storage. For another training use another "
            "RunConfig(name=...)."
        )
    if known is None:
        raise RunInUseError(f"The coordinator of {called} could not be started: {taken}") from taken
    logger.warning("The driver of %s does not answer and is taken for dead.", called)
    ray.kill(known)


def _find(run: str) -> ActorHandle | None:
    try:
        return ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
    except ValueError:
        return None


def _ask(coordinator: ActorHandle) -> Incumbent | None:
    try:
        answer: Any = ray.get(coordinator.who.remote(), timeout=ANSWER_TIMEOUT_S)
        return answer
    except (RayActorError, GetTimeoutError):
        return None
