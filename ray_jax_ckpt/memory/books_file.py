"""A run's state as its coordinator keeps it on storage: it follows the run's events."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import ray

from ray_jax_ckpt.errors import NotSupportedError, SnapshotTimeoutError
from ray_jax_ckpt.memory.claim import DriverIdentity
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.model.persistence import pause_s
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.chronicle import after as after_
from ray_jax_ckpt.storage.chronicle import not_settled, pending_of, with_rays_list
from ray_jax_ckpt.storage.filesystem import Place
from ray_jax_ckpt.storage.inventory import found_record, with_unremoved
from ray_jax_ckpt.storage.ray_state import read_ray_state
from ray_jax_ckpt.storage.records import Driver, Record, State
from ray_jax_ckpt.storage.saver import StateSaver
from ray_jax_ckpt.storage.state import StateFile

logger = logging.getLogger(__name__)

VALIDATION_INTERVAL_S = 5.0
LOOK_INTERVAL_S = 0.5
REPORT_DELAY_S = 0.5


def this_driver(driver_id: str, identity: DriverIdentity | None) -> Driver:
    """The driver that this coordinator works for; where nobody says who that is, its own process stands for it."""
    if identity is None:
        identity = DriverIdentity(
            socket.gethostname(), os.getpid(), ray.get_runtime_context().get_job_id(), time.time()
        )
    return Driver(
        id=driver_id, host=identity.host, pid=identity.pid, job_id=identity.job, started_at_s=identity.started_at_s
    )


class BooksFile:
    """For use in the coordinator's event loop; `heard` may be called by any thread. Storage is never waited for there.

    Args:
        run: Whose state.
        newest: Says which step is the newest complete one.
    """

    def __init__(self, run: RunIdentity, newest: Callable[[], int | None]) -> None:
        self._run, self._newest = run, newest
        self._lock = threading.Lock()
        self._state: State | None = None
        self._early: list[Callable[[State], State]] = []
        self._saver: StateSaver | None = None
        self._saved: Future[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def place(self) -> Place | None:
        """Where the run is; None: nowhere."""
        return None if self._run.filesystem is None else (self._run.filesystem, self._run.path)

    async def open(self, driver: Driver, after: Awaitable[None] | None = None) -> None:
        """Takes the run's state over for this driver. Tries until storage answers; what is heard meanwhile counts.

        Args:
            driver: Whose the state is from now on.
            after: Somebody who wants to read it as it was.
        """
        if after is not None:
            await after
        self._loop, failures = asyncio.get_running_loop(), 0
        filesystem = self._run.filesystem
        if filesystem is None:
            self._begin(State(run=self._run.name, driver=driver))
            return
        file = StateFile(filesystem, self._run.path)
        while self._state is None:
            try:
                state = await asyncio.to_thread(_load, file)
                self._saver = StateSaver(file)
                self._begin(state.taken_over(driver))
            except NotSupportedError as error:
                logger.warning("The run's state is not kept: %s", error)
                return
            except Exception as error:
                # Filesystems of users raise what they like.
                failures += 1
                logger.warning("The run's state cannot be read, trying again: %r", error)
                await asyncio.sleep(pause_s(failures))

    def heard(self, event: str, at_s: float, fields: dict[str, Any]) -> None:
        """Something has happened. Never raises."""
        known = {**fields, "last_step": self._newest()} if event in ("worker_group_failed", "finished") else fields
        try:
            self._change(lambda state: after_(state, event, at_s, known, self._run.path))
        except Exception:
            logger.exception("The run's state does not have the event %s.", event)
        if event == "reported" and self._loop is not None:
            self._loop.call_soon_threadsafe(self._look_soon)

    async def durable(self, timeout_s: float) -> str:
        """Waits until what was heard is on storage, at most so long. Returns what is wrong; "" if all is there."""
        saved = self._saved
        if saved is None:
            return "" if self._run.filesystem is None else "the run's state could not be read yet"
        try:
            # Shielded: giving up waiting is not to give up the state.
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(saved)), timeout_s)
        except TimeoutError:
            problem = "" if self._saver is None else self._saver.problem
            return f"the run's state was not written within {timeout_s:g} s ({problem or 'storage is slow'})"
        except Exception as error:
            return str(error)
        return ""

    async def settled(self, consistency: str | None, timeout_s: float) -> State:
        """The state, when nothing of it is on its way any more.

        Args:
            consistency: None: as it is. "committed": when nothing is being written. "validated": or validated.
            timeout_s: How long it may take.

        Raises:
            SnapshotTimeoutError: It takes longer. The message names what is pending.
        """
        deadline = time.monotonic() + timeout_s
        await self._follow()
        while True:
            state = self._state or State(run=self._run.name)
            pending = pending_of(state, consistency)
            if not pending:
                return state
            if time.monotonic() > deadline:
                raise SnapshotTimeoutError(not_settled(pending, consistency, timeout_s))
            await asyncio.sleep(LOOK_INTERVAL_S)
            if any(record.status is Status.VALIDATING for record in pending):
                await self._follow()

    def _begin(self, state: State) -> None:
        with self._lock:
            self._state, early, self._early = state, self._early, []
        self._change(lambda state: _all(state, early), always=True)
        self._look_soon()

    def _change(self, change: Callable[[State], State], always: bool = False) -> None:
        with self._lock:
            if self._state is None:
                self._early.append(change)
                return
            changed = change(self._state)
            if changed is self._state and not always:
                return
            self._state = changed
            if self._saver is not None:
                self._saved = self._saver.put(changed)

    # What was reported, which Ray keeps.

    def _look_soon(self) -> None:
        if self._loop is not None and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        """Ray tells nobody how a validation ends: its list does."""
        await asyncio.sleep(REPORT_DELAY_S)
        await self._follow()
        while self._state is not None and pending_of(self._state, "validated", origin="report"):
            await asyncio.sleep(VALIDATION_INTERVAL_S)
            await self._follow()

    async def _follow(self) -> None:
        """Takes over what Ray lists. Never raises."""
        if self._state is None or self._run.filesystem is None:
            return
        known = {one.path for one in self._state.checkpoints if one.generation is not None}
        try:
            listed, found = await asyncio.to_thread(self._read_list, known)
        except Exception as error:
            logger.warning("What was reported is not looked up in Ray's list: %r", error)
            return
        if listed is not None:
            self._change(lambda state: _changed_only(state, with_rays_list(state, listed, found)))

    def _read_list(self, known: set[str]) -> tuple[State | None, dict[str, Record]]:
        filesystem, path = self._run.filesystem, self._run.path
        assert filesystem is not None
        listed = read_ray_state(filesystem, path)
        new = [one.path for one in ([] if listed is None else listed.checkpoints) if one.path not in known]
        found = {one: found_record(filesystem, path, one, "report") for one in new}
        return listed, {one: record for one, record in found.items() if record is not None}


def _load(file: StateFile) -> State:
    return with_unremoved(file.load().state, file.filesystem, file.run_path)


def _all(state: State, changes: list[Callable[[State], State]]) -> State:
    for change in changes:
        try:
            state = change(state)
        except Exception:
            logger.exception("The run's state does not have an event that came before it was read.")
    return state


def _changed_only(before: State, now: State) -> State:
    return before if before == now else now
