"""A training whose state at every step is known beforehand, so that each restore can be checked to the last bit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

EVERY = 5
STEP_S = 0.02
SHAPE = (64, 256)
FACTOR, SUMMAND = np.uint32(1664525), np.uint32(1013904223)


class Position:
    """A data iterator that only counts."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def get_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def set_state(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Training:
    """A linear congruential generator per element, on all devices, with a PRNG key and a counter on the host."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("x",))
        self.rows, self.everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        self._advance = jax.jit(
            lambda x, n: (x * FACTOR + SUMMAND + n, n + np.uint32(1)),
            donate_argnums=0,
            out_shardings=(self.rows, self.everywhere),
        )

    def state(self, step: int) -> dict[str, Any]:
        """The state after a step, computed on the host."""
        import jax

        x = np.arange(SHAPE[0] * SHAPE[1], dtype=np.uint32).reshape(SHAPE)
        for number in range(1, step + 1):
            x = x * FACTOR + SUMMAND + np.uint32(number)
        key = np.array([7, step // EVERY], np.uint32)
        return {
            "x": self._put(x, self.rows),
            "n": self._put(np.array(step + 1, np.uint32), self.everywhere),
            "key": jax.random.wrap_key_data(self._put(key, self.everywhere)),
            "host": {"count": np.full(3, step), "step": step, "name": "soak", "nothing": None},
        }

    def advance(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        """One step; the array is donated, the counter changed in place."""
        import jax

        x, n = self._advance(state["x"], state["n"])
        key = jax.random.wrap_key_data(self._put(np.array([7, step // EVERY], np.uint32), self.everywhere))
        state["host"]["count"] += 1
        return {"x": x, "n": n, "key": key, "host": state["host"] | {"step": step}}

    def _put(self, value: np.ndarray, sharding: Any) -> Any:
        import jax

        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def train(config: dict[str, Any]) -> None:
    """What each worker runs, until the file `stop` names a step that has passed."""
    import ray
    import ray.train

    import ray_jax_ckpt as rjc
    from ray_jax_ckpt.errors import CheckpointError

    work, rank = Path(config["work"]), ray.train.get_context().get_world_rank()
    log, training, position, step = Log(work / f"rank{rank}.jsonl"), Training(), Position(), 0
    state = training.state(0)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        restored = rjc.restore(checkpoint, state, data=position)
        state, step, source = restored.state, restored.step, restored.source
        log.add("restored", step=step, source=source, problem=_difference(training, restored, position))
        del restored
    log.add("started", step=step, pid=os.getpid(), node=ray.get_runtime_context().get_node_id())
    while not _stops(work / "stop", step):
        step += 1
        time.sleep(STEP_S)
        state = training.advance(state, step)
        position.taken = step
        if rjc.snapshot(step, state, data=position) is not None:
            try:
                rjc.wait()
                log.add("protected", step=step)
            except CheckpointError as error:
                log.add("not protected", step=step, why=str(error)[:300])
        log.add("step", step=step)


def _difference(training: Training, restored: Any, position: Position) -> str:
    from ray_jax_ckpt.testing import assert_identical

    try:
        assert_identical(restored.state, training.state(restored.step))
        assert position.taken == restored.step, f"the data iterator is at {position.taken}"
    except AssertionError as error:
        return str(error)
    return ""


def _stops(file: Path, step: int) -> bool:
    return file.exists() and step >= int(file.read_text())


class Log:
    """What a rank saw, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, **fields: Any) -> None:
        """Appends a line with the time."""
        with self._path.open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")


def read(work: Path) -> list[dict[str, Any]]:
    """What all ranks saw, with their ranks, in the order of time. A line that is being written does not count yet."""
    events = []
    for path in work.glob("rank*.jsonl"):
        rank = int(path.stem.removeprefix("rank"))
        events += [{"rank": rank, **json.loads(line)} for line in path.read_text().split("\n")[:-1]]
    return sorted(events, key=lambda event: event["time"])
