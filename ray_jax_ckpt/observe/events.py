"""What happened to a run, one JSON object a line: `<run directory>/ray_jax_ckpt/events.jsonl`."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow.fs

logger = logging.getLogger(__name__)

FILE = "ray_jax_ckpt/events.jsonl"
MAX_EVENTS = 10_000
FLUSH_DELAY_S = 0.2

Write = Callable[[pyarrow.fs.FileSystem, str, bytes], None]


class EventLog:
    """Collects events and rewrites their file in the background. Thread-safe; never raises, never blocks on storage.

    Each line holds `time` (seconds since the epoch), `event`, and the event's own fields. The newest 10,000 are kept.

    Args:
        filesystem: Where the run is. None: events are only kept in memory.
        run_path: Its directory.
        heard: Told of each event: name, time and fields.
        write: Writes a whole file, in a way that leaves the old one when it fails: a full disk is to cost no events.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem | None,
        run_path: str,
        heard: Callable[[str, float, dict[str, Any]], None] | None = None,
        *,
        write: Write,
    ) -> None:
        self._heard, self._write_file = heard, write
        self._filesystem, self._path = filesystem, f"{run_path}/{FILE}"
        self._lines: list[str] = []
        self._dirty = threading.Event()
        self._flushed = threading.Condition()
        self._pending = 0
        if filesystem is not None:
            threading.Thread(target=self._run, name="events", daemon=True).start()

    def add(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        """Records an event, at `at` (seconds since the epoch) or now."""
        at = at or time.time()
        line = json.dumps({"time": at, "event": event, **fields}, default=str)
        with self._flushed:
            self._lines = [*self._lines[-MAX_EVENTS + 1 :], line]
            self._pending += 1
        self._dirty.set()
        if self._heard is not None:
            self._heard(event, at, fields)

    def flush(self, timeout_s: float) -> None:
        """Waits until what was added is written, at most `timeout_s`."""
        if self._filesystem is not None:
            with self._flushed:
                self._flushed.wait_for(lambda: self._pending == 0, timeout_s)

    def _read_back(self) -> None:
        """An earlier driver's events of this run stay."""
        assert self._filesystem is not None
        try:
            with self._filesystem.open_input_stream(self._path) as stream:
                earlier = stream.read().decode().splitlines()
        except Exception as error:
            # Filesystems of users raise what they like; most often there is no file yet.
            logger.debug("No earlier events at %s: %r", self._path, error)
            return
        with self._flushed:
            self._lines = [*earlier, *self._lines][-MAX_EVENTS:]

    def _run(self) -> None:
        self._read_back()
        while True:
            self._dirty.wait()
            time.sleep(FLUSH_DELAY_S)
            self._dirty.clear()
            with self._flushed:
                lines, count = self._lines, self._pending
            self._write("".join(f"{line}\n" for line in lines).encode())
            with self._flushed:
                self._pending -= count
                self._flushed.notify_all()

    def _write(self, content: bytes) -> None:
        assert self._filesystem is not None
        try:
            self._filesystem.create_dir(self._path.rsplit("/", 1)[0], recursive=True)
            self._write_file(self._filesystem, self._path, content)
        except Exception as error:
            logger.warning("Events of the run could not be written to %s: %s", self._path, error)
