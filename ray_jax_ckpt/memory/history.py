"""What an earlier driver has left word of: that the run ended well, or who may be training it somewhere else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

import pyarrow.fs
import ray

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.storage.filesystem import join
from ray_jax_ckpt.storage.records import State, parse_state
from ray_jax_ckpt.storage.segments import read_small
from ray_jax_ckpt.storage.state import PREVIOUS, STATE
from ray_jax_ckpt.storage.streams import Deadline

logger = logging.getLogger(__name__)

# A driver that lives has written its state within this.
RECENT_S = 900.0
LOAD_S = 20.0


class History:
    """The state of a run as it was before this driver. For use in one event loop; nothing is changed.

    Args:
        run: Which.
        driver: Id of this driver, which may have taken the state over already.

    Attributes:
        state: None: there is none, or it could not be read; others say so, and rebuild it.
        own: What a coordinator of this driver that was killed has left; None: there was none.
    """

    def __init__(self, run: RunIdentity, driver: str) -> None:
        self._run, self._driver = run, driver
        self._loading: asyncio.Task[None] | None = None
        self.state: State | None = None
        self.own: State | None = None

    @property
    def first_attempt(self) -> int:
        """Of the run as this driver has started it anew; 0 if it has not, or nobody has left word of it."""
        return 0 if self.own is None else self.own.first_attempt

    @property
    def has_reported(self) -> bool:
        """Whether something was reported through Ray since this driver began."""
        if self.own is None or self.own.driver is None:
            return False
        since = self.own.driver.started_at_s
        return any(one.origin == "report" and one.created_at_s >= since for one in self.own.checkpoints)

    async def load(self) -> None:
        """Waits until it is read, at most `LOAD_S`. Never raises; the first call counts."""
        if self._run.filesystem is None:
            return
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load(self._run.filesystem))
        await asyncio.wait([self._loading], timeout=LOAD_S)

    async def _load(self, filesystem: pyarrow.fs.FileSystem) -> None:
        try:
            found = await asyncio.to_thread(_read, filesystem, join(self._run.path, STATE))
            mine = found is not None and found.driver is not None and found.driver.id == self._driver
            if mine:
                self.own = found
            if found is None or mine:
                found = await asyncio.to_thread(_read, filesystem, join(self._run.path, PREVIOUS))
            self.state = found
        except Exception as error:
            # Filesystems of users raise what they like, and most often there is no state yet.
            logger.debug("No state of %s: %r", self._run.path, error)

    @property
    def latest_attempt(self) -> int:
        """The highest that began; 0 if none did. It may have left nothing else."""
        return max((one.attempt for one in self.state.attempts), default=0) if self.state is not None else 0

    def warn_of_rival(self) -> None:
        """Says so when another Ray cluster may be training this run. On this one nobody else does."""
        here: list[Any] = ray.nodes()
        said = "" if self.state is None else rival(self.state, {node["NodeManagerHostname"] for node in here})
        if said:
            logger.warning("Run %s: %s", self._run.name, said)

    def warn_of_end(self, step: int) -> bool:
        """Says so when a run goes on that had ended well; returns whether it had."""
        if self.state is None or self.state.finished_at_s is None:
            return False
        logger.warning(
            "Run %s ended well at %s, and goes on now from step %d, as it does with Ray Train alone. To train anew "
            "use another RunConfig(name=...), or CheckpointManager(resume='never').",
            self._run.name,
            _at(self.state.finished_at_s),
            step,
        )
        return True


def rival(state: State, hosts_here: Collection[str], now_s: float | None = None) -> str:
    """What to say of the driver that wrote a state; "" if it has ended, long ago fallen silent, or was of this cluster.

    Args:
        state: Of the run.
        hosts_here: Names of the machines of this Ray cluster: whoever ran on one is known not to run any more.
        now_s: Unix time; None: now.
    """
    driver, last = state.driver, state.attempts[-1:]
    heard = [one.started_at_s for one in last] + [one.created_at_s for one in state.checkpoints]
    ended = state.finished_at_s is not None or any(one.ended for one in last)
    if driver is None or ended or not driver.host or driver.host in hosts_here:
        return ""
    age_s = (time.time() if now_s is None else now_s) - max([driver.started_at_s, *heard])
    if age_s > RECENT_S:
        return ""
    return (
        f"process {driver.pid} on {driver.host} (Ray job {driver.job_id}), which is no machine of this Ray cluster, "
        f"trained it {max(0.0, age_s):.0f} s ago and has not said that it ended. Clusters cannot see each other: if "
        "it still trains, end one of the two, or give one another RunConfig(name=...)."
    )


def _at(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def _read(filesystem: pyarrow.fs.FileSystem, path: str) -> State | None:
    try:
        return parse_state(read_small(filesystem, path, Deadline.after(LOAD_S)), path)
    except CheckpointError as error:
        logger.debug("No state at %s: %r", path, error)
        return None
