"""Several reads at a time, of storage that may be slow, fail now and then, or hang."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ray_jax_ckpt.errors import RestoreTimeoutError, StorageError
from ray_jax_ckpt.storage.filesystem import is_final, reading

Value = TypeVar("Value")

ATTEMPTS = 4
ASK_S = 120.0
_FIRST_PAUSE_S = 0.1
_GRACE_S = 1.0


@dataclass(frozen=True)
class Deadline:
    """When waiting ends.

    Attributes:
        timeout_s: How long it was from the start, for messages.
        at_s: On `time.monotonic`.
    """

    timeout_s: float
    at_s: float
    stopped: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set when nobody waits any more, because something else has failed."""

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """So many seconds from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    def again(self) -> Deadline:
        """The same moment for other work, which goes on when this has failed."""
        return Deadline(self.timeout_s, self.at_s)

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.at_s - time.monotonic())

    def check(self, what: str) -> None:
        """Raises RestoreTimeoutError if it is over, or nobody waits."""
        if self.left_s <= 0 or self.stopped.is_set():
            raise self.error(what)

    def error(self, what: str) -> RestoreTimeoutError:
        """What is raised when it is over."""
        return RestoreTimeoutError(
            f"{what} was not done within {self.timeout_s:g} s. Storage is slow or does not answer: raise timeout_s, or "
            "look at the storage."
        )


@dataclass(frozen=True)
class Job:
    """Something to read.

    Attributes:
        name: What, for messages.
        run: Does it. Called in some thread; looks at the deadline now and then.
    """

    name: str
    run: Callable[[], None]


def run(jobs: Sequence[Job], *, streams: int, deadline: Deadline) -> None:
    """Runs jobs, so many at a time, and returns when all are done. The first failure ends it.

    Raises:
        RestoreTimeoutError: They were not done in time. Threads that hang in the storage's client are left behind: they
            cannot be stopped, and do not keep the process from ending.
        Exception: What a job raised.
    """
    todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    count = min(streams, len(jobs))
    for _ in range(count):
        todo.put(None)
    running: dict[int, str] = {}
    # Not of a pool: the interpreter would wait for its threads when it ends.
    arguments = (todo, done, running, deadline)
    threads = [
        threading.Thread(target=_work, args=(number, *arguments), daemon=True, name="rjc-storage")
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            _wait(done, running, deadline)
    except BaseException:
        deadline.stopped.set()
        # A thread that comes out of C++ code when the interpreter has ended takes the process with it.
        join_all(threads, _GRACE_S)
        raise


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Waits for threads, so long for all of them together; those that still run are left behind."""
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _wait(done: queue.SimpleQueue[BaseException | None], running: dict[int, str], deadline: Deadline) -> None:
    try:
        error = done.get(timeout=deadline.left_s)
    except queue.Empty:
        raise deadline.error(next(iter(list(running.values())), "Reading")) from None
    if error is not None:
        raise error


def _work(
    number: int,
    todo: queue.SimpleQueue[Job | None],
    done: queue.SimpleQueue[BaseException | None],
    running: dict[int, str],
    deadline: Deadline,
) -> None:
    while not deadline.stopped.is_set() and (job := todo.get()) is not None:
        running[number] = job.name
        try:
            job.run()
        except BaseException as error:
            done.put(error)
            return
        finally:
            running.pop(number, None)
        done.put(None)


def ask(call: Callable[[], Value], what: str, deadline: Deadline | None = None) -> Value:
    """The result of a call to a filesystem that reads little, such as a listing: bounded, and made again if it fails.

    Args:
        call: Any number of times.
        what: It does, for messages.
        deadline: None: `ASK_S` from now.

    Raises:
        NoCheckpointError: What is asked for is not there.
        StorageError, RestoreTimeoutError: As `retried`.
    """
    until, found = deadline or Deadline.after(ASK_S), list[Value]()

    def once() -> Value:
        with reading(what):
            return call()

    run([Job(what, lambda: found.append(retried(once, until, what)))], streams=1, deadline=until)
    return found[0]


def retried(call: Callable[[], Value], deadline: Deadline, what: str) -> Value:
    """The result of a call that is made again, after a growing pause, while storage fails in ways that may pass.

    Raises:
        StorageError: It failed `ATTEMPTS` times, or access is denied.
        RestoreTimeoutError: The deadline came first.
    """
    for attempt in range(ATTEMPTS):
        deadline.check(what)
        try:
            return call()
        except StorageError as error:
            if attempt == ATTEMPTS - 1 or is_final(error):
                raise
            # Many ranks that were throttled together must not come back together.
            pause_s = _FIRST_PAUSE_S * 4**attempt * random.uniform(0.5, 1.5)
            deadline.stopped.wait(min(pause_s, deadline.left_s))
    raise AssertionError
