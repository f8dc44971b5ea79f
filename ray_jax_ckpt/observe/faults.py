"""Named points of a snapshot's way at which a test may have something go wrong. Users: see `ray_jax_ckpt.testing`.

Faults lie as files in a directory that an environment variable names, so that they reach every process that Ray starts
and can be added while it runs. Each fires once, in the first process that comes to its point: claiming it renames its
file. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.model.shards import Generation

VARIABLE = "RAY_JAX_CKPT_FAULTS"

POINTS = {
    "capture": "worker: a snapshot is due; no copy off the devices has been dispatched",
    "grant": "worker: the store has granted a buffer; copies may still be leaving the devices",
    "copy": "worker: one array has been copied into the store's buffer; comes once per array",
    "commit": "worker: the buffer is full; the store has not been told",
    "restore": "worker: restore was called; nothing has been read",
    "read": "worker: it knows where the bytes lie, and reads them next",
    "confirm": "worker: its state is restored; the other ranks have not been met",
    "committed": "store: it has taken its worker's buffer over; nobody knows of it",
    "push": "store: parts are about to be sent to a peer, by a snapshot or to replace lost copies",
    "send": "store: a chunk of a push is about to be sent",
    "receive": "store: a peer's push has got a buffer; no byte has come",
    "received": "store: a peer's push is here and verified; nobody knows of it",
    "verify": "store: what it holds of a generation is about to be digested again, for a restore",
    "serve": "store: a chunk is about to be sent to a worker that restores",
    "persist": "store: it is about to write its share of a checkpoint to storage",
    "persisted": "store: its share is on storage; nobody knows of it",
    "finish": "store: all files of a checkpoint are on storage; its manifest is about to be written",
    "report": "coordinator: a store has reported what it holds; the books do not have it",
    "free": "coordinator: buffers have been found to be free; no store has been told",
    "decide": "coordinator: a new worker group has come and the stores have answered; nothing has been decided",
}
"""Each point: the process that comes to it, and when."""

CHUNKS = ("send", "serve")

Action = Literal["kill", "stop", "raise", "delay", "drop", "truncate", "corrupt"]
"""kill: SIGKILL. stop: SIGSTOP. raise: InjectedError. delay: sleeps `delay_s`. At the points "send" and "serve" also
drop (the chunk is left out), truncate (its second half is) and corrupt (a bit of it is flipped)."""

_TAMPERING = ("drop", "truncate", "corrupt")


class InjectedError(RuntimeError):
    """What the action "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once, when a process of a run comes to a point for the `occurrence`-th time.

    Attributes:
        point: One of `POINTS`.
        action: See `Action`.
        rank: Only in the worker of this rank, or in its store. None: in any. A coordinator has no rank.
        step: Only on the way of this step's snapshot. None: of any.
        occurrence: Counted over all processes that the fault fits, from 1.
        delay_s: How long "delay" sleeps.

    Raises:
        ConfigError: There is no such point or action, or they do not fit.
    """

    point: str
    action: Action
    rank: int | None = None
    step: int | None = None
    occurrence: int = 1
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ConfigError(f"There is no point {self.point!r}; take one of {sorted(POINTS)}.")
        if self.action not in get_args(Action):
            raise ConfigError(f"There is no action {self.action!r}; take one of {get_args(Action)}.")
        if self.action in _TAMPERING and self.point not in CHUNKS:
            raise ConfigError(f"{self.action!r} needs bytes on their way: use it at one of {CHUNKS}.")

    def fits(self, point: str, rank: int | None, step: int) -> bool:
        """Whether a process of a rank that comes to a point is meant."""
        return self.point == point and self.rank in (None, rank) and self.step in (None, step)


_directory: Path | None = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
_rank: int | None = None


def use(directory: Path | None) -> None:
    """Where this process finds its faults from now on; None: nowhere."""
    global _directory
    _directory = directory


def identify(rank: int | None) -> None:
    """This process is the worker of a rank, or its store."""
    global _rank
    _rank = rank


def reach(point: str, step: int) -> None:
    """This process has come to a point on the way of a step's snapshot."""
    if _directory is not None:
        _fire(_claim(_directory, point, step))


def tamper(point: str, generation: str, chunk: np.ndarray) -> np.ndarray:
    """Like `reach`, with bytes of a generation on their way; returns what is to be sent instead."""
    if _directory is None:
        return chunk
    fault = _claim(_directory, point, Generation.parse(generation).step)
    _fire(fault)
    if fault is None or fault.action not in _TAMPERING:
        return chunk
    if fault.action == "corrupt":
        chunk = chunk.copy()
        chunk[chunk.nbytes // 3] ^= 0x10
        return chunk
    return chunk[: chunk.nbytes // 2 if fault.action == "truncate" else 0]


def _fire(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "raise":
        raise InjectedError(f"injected at point {fault.point!r}")
    elif fault.action == "delay":
        time.sleep(fault.delay_s)


def _claim(directory: Path, point: str, step: int) -> Fault | None:
    """The fault that fires here and now, if any. It is nobody else's from then on."""
    for path in sorted(directory.glob("*.armed")):
        with _locked(directory):
            fault = _read(path)
            if fault is None or not fault.fits(point, _rank, step):
                continue
            if fault.occurrence > 1:
                _replace(path, path, {**asdict(fault), "occurrence": fault.occurrence - 1})
                continue
            fired = {"pid": os.getpid(), "rank": _rank, "step": step, "time": time.time()}
            _replace(path, path.with_suffix(".fired"), fired)
            path.unlink()
            return fault
    return None


def _read(path: Path) -> Fault | None:
    try:
        return Fault(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _replace(path: Path, target: Path, content: dict[str, object]) -> None:
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(content))
    aside.rename(target)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The system lets go of the lock when its holder is killed."""
    try:
        file = (directory / "lock").open("a")
    except FileNotFoundError:  # the test is over
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
