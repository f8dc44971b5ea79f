"""Kills a worker process, later a whole node, at given steps of a running training."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gpt.progress import read_progress


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is to die after which finished step, and the rank that is hit."""

    kind: Literal["worker", "node"]
    step: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Death:
    """What died: `step` is the last step that was finished by then, `time` in Unix seconds."""

    kind: Literal["worker", "node"]
    step: int
    rank: int
    time: float
    pid: int
    node_id: str
    num_processes: int = 1

    def __str__(self) -> str:
        if self.kind == "worker":
            return f"worker process {self.pid} of rank {self.rank}"
        return f"node {self.node_id[:8]} with rank {self.rank} ({self.num_processes} processes: raylet, worker, stores)"


def plan_faults(num_steps: int, every_n_steps: int, *, nodes: bool = True) -> list[Fault]:
    """A worker dies at about 40 % of the steps, a node at about 70 %, each between two snapshots.

    Raises:
        ValueError: So few steps that a fault would come before there is a snapshot, or before the run has recovered.
    """
    offset = every_n_steps // 2
    steps = [round(part * num_steps / every_n_steps) * every_n_steps + offset for part in (0.4, 0.7)]
    if steps[0] < 2 * every_n_steps or steps[1] < steps[0] + 2 * every_n_steps or steps[1] >= num_steps:
        raise ValueError(
            f"{num_steps} steps with a snapshot every {every_n_steps} leave no room for two failures: "
            f"take at least {10 * every_n_steps} steps, or --no-faults"
        )
    return [Fault("worker", steps[0], rank=1), Fault("node", steps[1], rank=0)][: 2 if nodes else 1]


class FaultInjector(threading.Thread):
    """Watches a run's progress files and carries out the plan, in order. `deaths` is what it did.

    Args:
        run_dir: Where the ranks write their progress.
        plan: Faults, by ascending step.
        say: Gets one line per fault.
        release_spare: Called before a node is killed, so that another can take its place.
    """

    def __init__(
        self, run_dir: Path, plan: list[Fault], say: Callable[[str], None], release_spare: Callable[[], None]
    ) -> None:
        super().__init__(name="faults", daemon=True)
        self.deaths: list[Death] = []
        self.problem: str | None = None
        self._run_dir, self._plan, self._say, self._release_spare = run_dir, plan, say, release_spare
        self._done = threading.Event()

    def close(self) -> None:
        """Ends the watching."""
        self._done.set()
        self.join()

    def run(self) -> None:
        for fault in self._plan:
            if (record := self._wait_for(fault)) is None:
                return
            try:
                self._kill(fault, record)
            except (OSError, ValueError) as error:
                self.problem = f"could not kill the {fault.kind} of rank {fault.rank}: {error}"
                self._say(self.problem)
                return

    def _wait_for(self, fault: Fault) -> dict[str, Any] | None:
        after = self.deaths[-1].time if self.deaths else 0.0
        while not self._done.is_set():
            for record in read_progress(self._run_dir):
                if record["time"] > after and _reaches(record, fault):
                    return record
            self._done.wait(0.02)
        return None

    def _kill(self, fault: Fault, record: dict[str, Any]) -> None:
        from ray_jax_ckpt.testing import kill_node, kill_process

        if record["host"] != socket.gethostname():
            raise ValueError(f"it runs on {record['host']}, and only processes of this machine can be killed")
        if fault.kind == "node":
            self._release_spare()
        time.sleep(self._step_time_s() / 2)  # into the middle of the next step
        begun = time.time()
        num_processes = 1
        if fault.kind == "worker":
            kill_process(record["pid"])
        else:
            num_processes = len(kill_node(record["node_id"]))
        last = max(r["step"] for r in read_progress(self._run_dir) if r["event"] == "step" and r["time"] <= begun)
        death = Death(fault.kind, last, fault.rank, begun, record["pid"], record["node_id"], num_processes)
        self.deaths.append(death)
        self._say(f"KILLED {death} in the middle of step {last + 1}")

    def _step_time_s(self) -> float:
        times = [record["time"] for record in read_progress(self._run_dir) if record["event"] == "step"][-12:]
        return (times[-1] - times[0]) / max(1, len(times) / 2) if len(times) > 1 else 0.0


def _reaches(record: dict[str, Any], fault: Fault) -> bool:
    return record["event"] == "step" and record["rank"] == fault.rank and record["step"] >= fault.step
