"""What every rank did and when, as JSON lines in the run's directory: the driver sees it at once, without a call."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

FOLDER = "progress"


class Progress:
    """Appends one rank's events to `<run_dir>/progress/rank-<rank>.jsonl`. SIGKILL loses nothing written before."""

    def __init__(self, run_dir: str | Path, rank: int, node_id: str) -> None:
        folder = Path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._who = {"rank": rank, "pid": os.getpid(), "node_id": node_id, "host": socket.gethostname()}
        self._path = folder / f"rank-{rank}.jsonl"

    def event(self, event: str, **fields: Any) -> None:
        """Writes one event with the time (Unix seconds), rank, process and node."""
        record = {"time": time.time(), "event": event, **self._who, **fields}
        with self._path.open("ab", buffering=0) as file:  # one write per line: a killed process leaves whole lines
            file.write(json.dumps(record).encode() + b"\n")

    def step(self, step: int, loss: float) -> None:
        """Writes a finished step; the loss as hexadecimal, so that it can be compared bit by bit."""
        self.event("step", step=step, loss=float(loss).hex())


def read_progress(run_dir: str | Path) -> list[dict[str, Any]]:
    """Returns the events of all ranks, oldest first; none if nothing was written yet."""
    return _read_lines(sorted((Path(run_dir) / FOLDER).glob("rank-*.jsonl")))


def read_package_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Returns what ray_jax_ckpt logged about this run, oldest first; none if it did not."""
    return _read_lines([Path(run_dir) / "ray_jax_ckpt" / "events.jsonl"])


def _read_lines(paths: list[Path]) -> list[dict[str, Any]]:
    records = []
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # being written right now
            if isinstance(record, dict) and "time" in record and "event" in record:
                records.append(record)
    return sorted(records, key=lambda record: record["time"])
