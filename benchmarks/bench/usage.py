"""Memory of the processes of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

KINDS = {
    "ray::RayTrainWorker": "worker",
    "ray::ReplicaStore": "store",
    "ray::Coordinator": "coordinator",
    "ray::TrainController": "controller",
}
INTERVAL_S = 0.01


@dataclass(frozen=True)
class Process:
    """A process of the run, and what it does."""

    pid: int
    kind: str


def find_processes(raylets: Sequence[int]) -> list[Process]:
    """Workers, stores, coordinator and controller under these raylets."""
    found = []
    for raylet in raylets:
        for child in psutil.Process(raylet).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(child.cmdline())
                kind = next((kind for name, kind in KINDS.items() if name in title), None)
                if kind is not None:
                    found.append(Process(child.pid, kind))
    return found


def measure_processes(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """RSS and PSS of each, in bytes. RSS counts shared pages in every process, PSS once in all."""
    return [
        {
            "kind": process.kind,
            "rss": _field(process.pid, "status", "VmRSS"),
            "pss": _field(process.pid, "smaps_rollup", "Pss"),
        }
        for process in sorted(processes, key=lambda p: p.kind)
    ]


def private_bytes(processes: Sequence[Process]) -> int:
    """Anonymous memory of all of them. What stores hold is not in it: segments belong to no process."""
    return sum(_field(process.pid, "status", "RssAnon") for process in processes)


@dataclass
class PeakMeter:
    """Samples a number of bytes a hundred times a second while its context is open.

    Attributes:
        peak: The largest.
    """

    read: Callable[[], int]
    peak: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PeakMeter:
        self._thread = threading.Thread(target=self._run, name="peak", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self.read())
            time.sleep(INTERVAL_S)


def _field(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
