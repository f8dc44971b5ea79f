"""Seconds from the death of a worker until the step in which it died is done: ours, and stock Ray Train with Orbax."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import Machines, fit
from bench.snapshot import NUM_WORKERS, worker_environment
from ray_jax_ckpt._ray_compat import WorkerGroupCallback

NUM_LEAVES = 16  # of 4 MiB
POLL_S = 2.0
PHASES = ("notice", "teardown", "start", "connect", "set up", "restore", "first step", "catching up")
"""Each lasts from the end of the one before, the first from the kill. notice: the controller knows; teardown: the old
workers are gone; start: new worker processes are up; connect: jax.distributed is up; set up: the train function has
built its step and asks for its state; restore: all ranks have it; first step: it is done; catching up: the step it died
in is done."""


@dataclass(frozen=True)
class Plan:
    """One run with deaths.

    Attributes:
        name: Of the run.
        ours: This package; else stock Ray Train with Orbax.
        every: Steps between snapshots, or reported checkpoints.
        deaths: Steps in which rank 1 kills itself, once each.
    """

    name: str
    ours: bool
    every: int
    deaths: tuple[int, ...]


def run(plan: Plan, machines: Machines) -> list[dict[str, Any]]:
    """Trains through the deaths. Returns one record per death: seconds per phase, in all, and the steps done again."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    import ray_jax_ckpt as rjc

    work = machines.work / plan.name
    work.mkdir()
    manager = [rjc.CheckpointManager(snapshot=rjc.SnapshotConfig(every_n_steps=plan.every))] if plan.ours else []
    config = {"work": str(work), "ours": plan.ours, "every": plan.every, "deaths": list(plan.deaths)}
    trainer = JaxTrainer(
        train_fn,
        train_loop_config=config,
        # Stock: what makes it connect the processes at all; the environment keeps it on CPUs.
        jax_config=rjc.JaxConfig() if plan.ours else JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(
            num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(work),
            failure_config=FailureConfig(max_failures=len(plan.deaths)),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[*manager, Stamps(str(work / "controller.jsonl"))],
            worker_runtime_env={"env_vars": worker_environment(work)},
        ),
    )
    fit(trainer)
    stamps = [stamp for path in work.glob("*.jsonl") for stamp in map(json.loads, path.read_text().splitlines())]
    return _recoveries(sorted(stamps, key=lambda stamp: stamp["time"]))


class Stamps(WorkerGroupCallback):
    """Notes when the controller does what, for both kinds of runs alike."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """The poll that sees the death ends the phase `notice`."""
        if worker_group_status.errors:
            stamp(self._path, "noticed")

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Ends `teardown`."""
        stamp(self._path, "gone")

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Ends `start`."""
        stamp(self._path, "workers up")
        return {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Ends `connect`."""
        stamp(self._path, "connected")


def stamp(path: str, event: str, **fields: Any) -> None:
    """Appends a line with the time."""
    with open(path, "a") as file:
        file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")


def train_fn(config: dict[str, Any]) -> None:
    """Trains until shortly after the last death; rank 1 dies at the start of each planned step, once."""
    import ray.train

    from bench import workload

    work, rank = Path(config["work"]), ray.train.get_context().get_world_rank()
    log, died = str(work / f"rank{rank}.jsonl"), work / "deaths.jsonl"
    mesh = workload.make_mesh()
    train_step = workload.Step(mesh)
    train_step.num_products = 12
    num_deaths = len(died.read_text().splitlines()) if died.exists() else 0
    saver = (Ours if config["ours"] else Stock)(config)
    state = workload.make_state(mesh, workload.square_shapes(NUM_LEAVES), "p")
    stamp(log, "restoring")
    state, start = saver.restore(state)
    stamp(log, "restored", step=start)
    remaining = config["deaths"][num_deaths:]
    for number in range(start + 1, config["deaths"][-1] + 3):
        if rank == 1 and remaining and number == remaining[0]:
            # The controller looks every two seconds: deaths spread over them, or luck would decide how soon it notices.
            time.sleep((num_deaths + 0.5) / len(config["deaths"]) * POLL_S)
            stamp(str(died), "died", step=number)
            os.kill(os.getpid(), signal.SIGKILL)
        state = train_step(state, number)
        stamp(log, "step", step=number, rank=rank)
        if number % config["every"] == 0:
            saver.save(number, state)


class Ours:
    """Snapshots in memory."""

    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def save(self, step: int, state: Any) -> None:
        """Every `every` steps."""
        import ray_jax_ckpt as rjc

        rjc.snapshot(step, state)

    def restore(self, state: Any) -> tuple[Any, int]:
        """The newest complete snapshot, or the state given."""
        import ray.train

        import ray_jax_ckpt as rjc

        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return state, 0
        restored = rjc.restore(checkpoint, _abstract(state))
        return restored.state, restored.step


class Stock:
    """Orbax into a directory that both workers see, which `ray.train.report` then uploads."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._folder = Path(config["work"]) / "shared"

    def save(self, step: int, state: Any) -> None:
        """Every `every` steps."""
        import ray.train
        from orbax.checkpoint import v1

        first = ray.train.get_context().get_world_rank() == 0
        folder = self._folder / f"step{step}"
        v1.save(folder / "state", state, overwrite=True)
        if first:
            (folder / "step").write_text(str(step))
        checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
        ray.train.report({"step": step}, checkpoint=checkpoint)
        if first:
            shutil.rmtree(folder)

    def restore(self, state: Any) -> tuple[Any, int]:
        """The newest reported checkpoint, or the state given."""
        import jax
        import ray.train
        from orbax.checkpoint import v1

        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return state, 0
        with checkpoint.as_directory() as folder:
            state = jax.block_until_ready(v1.load(Path(folder) / "state", _abstract(state)))
            return state, int((Path(folder) / "step").read_text())


def _abstract(state: Any) -> Any:
    from bench import workload

    return workload.abstract(state)


def _recoveries(stamps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    deaths = [stamp for stamp in stamps if stamp["event"] == "died"]
    ends = [death["time"] for death in deaths[1:]] + [float("inf")]
    return [
        _recovery(death, [s for s in stamps if death["time"] < s["time"] < end])
        for death, end in zip(deaths, ends, strict=True)
    ]


def _recovery(death: dict[str, Any], stamps: list[dict[str, Any]]) -> dict[str, Any]:
    connected = _times(stamps, "connected")[0]
    # Survivors may still write stamps after the death; the new group's come after it has connected.
    new = [stamp for stamp in stamps if stamp["time"] > connected]
    steps = [stamp for stamp in new if stamp["event"] == "step"]
    first = min(stamp["step"] for stamp in steps)
    times = [
        death["time"],
        *(_times(stamps, event)[0] for event in ("noticed", "gone", "workers up", "connected")),
        max(_times(new, "restoring")),
        max(_times(new, "restored")),
        max(stamp["time"] for stamp in steps if stamp["step"] == first),
        max(stamp["time"] for stamp in steps if stamp["step"] == death["step"]),
    ]
    spans = zip(PHASES, itertools.pairwise(times), strict=True)
    seconds = {phase: end - start for phase, (start, end) in spans}
    return {"seconds": seconds, "total": times[-1] - times[0], "steps again": death["step"] - first}


def _times(stamps: list[dict[str, Any]], event: str) -> list[float]:
    return [stamp["time"] for stamp in stamps if stamp["event"] == event]
