"""Faults that wait for a run's processes at the points of `ray_jax_ckpt.observe.faults`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.observe.faults import Fault
from ray_jax_ckpt.testing.processes import kill_process, resume_process


@dataclass(frozen=True)
class Fired:
    """A fault that has happened.

    Attributes:
        pid: The process that it happened to.
        rank: Whose worker or store that is; None for a coordinator.
        step: The step that was on its way.
        time: When, in seconds since the epoch.
    """

    pid: int
    rank: int | None
    step: int
    time: float

    def resume(self) -> None:
        """Lets the process go on after "stop"."""
        resume_process(self.pid)

    def kill(self) -> None:
        """Kills the process, for example one that "stop" holds at its point."""
        kill_process(self.pid)


class Armed:
    """A fault that waits for its process, or has fired."""

    def __init__(self, path: Path, fault: Fault) -> None:
        self._path, self._fault = path, fault

    def fired(self) -> Fired | None:
        """What happened, or None as long as nothing has. Returns at once."""
        try:
            return Fired(**json.loads(self._path.with_suffix(".fired").read_text()))
        except FileNotFoundError:
            return None

    def wait(self, timeout_s: float = 60.0) -> Fired:
        """Waits until it has happened.

        Raises:
            TimeoutError: No process has come to its point in time.
        """
        deadline = time.monotonic() + timeout_s
        while (fired := self.fired()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._fault} did not fire within {timeout_s:g} s: no process came to its point")
            time.sleep(0.01)
        return fired

    def disarm(self) -> None:
        """It will not fire any more."""
        self._path.unlink(missing_ok=True)


class FaultPlan:
    """Faults for the processes of this machine, a context manager.

    Inside, every Ray node, worker and actor that is started by this process gets the faults from the environment; one
    is armed at any time and fires once, in the first process that fits. A Ray cluster that runs already needs
    `ray.init(runtime_env={"env_vars": plan.env_vars})`. Plans nest: after an inner one the outer one counts again.

    Attributes:
        env_vars: The environment variable through which processes find the plan.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ray_jax_ckpt_faults_"))
        self._count = 0
        self.env_vars: dict[str, str] = {faults.VARIABLE: str(self._directory)}
        self._outer: str | None = None

    def __enter__(self) -> FaultPlan:
        self._outer = os.environ.get(faults.VARIABLE)
        os.environ.update(self.env_vars)
        faults.use(self._directory)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._outer is None:
            os.environ.pop(faults.VARIABLE, None)
        else:  # nodes that start now belong to the plan around this one
            os.environ[faults.VARIABLE] = self._outer
        faults.use(None if self._outer is None else Path(self._outer))
        shutil.rmtree(self._directory, ignore_errors=True)

    def arm(self, fault: Fault) -> Armed:
        """Adds a fault. It counts from now on, in processes that run already as well."""
        self._count += 1
        path = self._directory / f"{self._count:06d}.armed"
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(asdict(fault)))
        aside.rename(path)
        return Armed(path, fault)

    def disarm(self) -> None:
        """No fault that is armed fires any more."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.glob("*.armed"):
                path.unlink(missing_ok=True)
