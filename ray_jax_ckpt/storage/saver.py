"""Writes states in the background: the newest one that is waiting, and again until storage takes it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from ray_jax_ckpt.errors import NotSupportedError, StaleDriverError
from ray_jax_ckpt.storage.state import State, StateFile

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
IDLE_S = 1.0


class StateSaver:
    """Thread-safe; never raises what storage raises, never blocks on it. Its thread lives while there is work.

    Args:
        file: Where to.
        failed: Told, in the saver's thread, of each failure, in words.

    Attributes:
        problem: What went wrong last; "" if the last state that was written is on storage.
    """

    def __init__(self, file: StateFile, failed: Callable[[str], None] | None = None) -> None:
        self.file, self.problem = file, ""
        self._failed = failed or (lambda said: None)
        self._changed = threading.Condition()
        self._next: State | None = None
        self._waiting: list[Future[None]] = []
        self._writing = self._closed = False
        self._thread: threading.Thread | None = None
        self._writer: object = None

    def amend(self, state: State, writer: object) -> None:
        """Has a state written, unless another writer's came after this one's last: that one's knows more."""
        with self._changed:
            if self._writer is writer:
                self.put(state, writer)

    def put(self, state: State, writer: object = None) -> Future[None]:
        """Has a state written. One that waits still is passed over for it.

        Args:
            state: All of it.
            writer: Whose it is, by identity.

        Returns:
            Done when this state, or a later one, is on storage; with an error when no later one will be.
        """
        outcome: Future[None] = Future()
        with self._changed:
            if self._closed:
                outcome.set_exception(StaleDriverError(self.problem or "The run's state is closed."))
                return outcome
            self._next, self._writer = state, writer
            self._waiting.append(outcome)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rjc-state", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return outcome

    def flush(self, timeout_s: float) -> str:
        """Waits until what was put is on storage, at most so long. Returns what is wrong; "" if all is there."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._closed or not (self._writing or self._next), timeout_s)
            return self.problem if done else self.problem or f"the state was not written within {timeout_s:g} s"

    @property
    def closed(self) -> bool:
        """Whether nothing more is written."""
        return self._closed

    def close(self) -> None:
        """Nothing more is written; what waits is given up."""
        with self._changed:
            self._end("The run's state is closed.")

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (taken := self._take()) is not None:
            state, waiting = taken
            try:
                self.file.save(state)
            except (StaleDriverError, NotSupportedError) as error:
                logger.warning("The run's state is not written any more: %s", error)
                self._give_up(waiting, error)
            except Exception as error:
                # Filesystems of users raise what they like.
                self._retry(state, waiting, f"{type(error).__name__}: {error}", pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self._written(waiting)
                pause_s = FIRST_PAUSE_S

    def _take(self) -> tuple[State, list[Future[None]]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next is not None, IDLE_S)
            if self._closed or self._next is None:
                self._thread = None
                return None
            state, waiting = self._next, self._waiting
            self._next, self._waiting, self._writing = None, [], True
            return state, waiting

    def _written(self, waiting: list[Future[None]]) -> None:
        with self._changed:
            self._writing, self.problem = False, ""
            self._changed.notify_all()
        for outcome in waiting:
            # One that somebody has cancelled needs no word.
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(None)

    def _retry(self, state: State, waiting: list[Future[None]], said: str, pause_s: float) -> None:
        where = self.file.run_path
        logger.warning("The state of %s could not be written, trying again in %.0f s: %s", where, pause_s, said)
        with self._changed:
            self.problem = said
            # What came meanwhile is newer.
            self._next, self._waiting = self._next or state, waiting + self._waiting
        self._failed(said)
        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)
            self._writing = False
            self._changed.notify_all()

    def _give_up(self, waiting: list[Future[None]], error: Exception) -> None:
        with self._changed:
            self._waiting = waiting + self._waiting
            self._end(str(error))
        self._failed(str(error))

    def _end(self, said: str) -> None:
        self._closed, self._writing, self._next, self.problem = True, False, None, self.problem or said
        waiting, self._waiting = self._waiting, []
        self._changed.notify_all()
        for outcome in waiting:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(StaleDriverError(said))


_savers: weakref.WeakValueDictionary[tuple[str, str], StateSaver] = weakref.WeakValueDictionary()
_savers_lock = threading.Lock()


def saver_of(file: StateFile) -> StateSaver:
    """This process's saver of a run, the same for all who ask: so that their states come in order."""
    key = (file.filesystem.type_name, file.run_path)
    with _savers_lock:
        saver = _savers.get(key)
        if saver is None or saver.closed or not saver.file.filesystem.equals(file.filesystem):
            saver = _savers[key] = StateSaver(file)
        return saver
