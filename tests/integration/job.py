"""A small training, the same in the workers of a run and, for comparison, uninterrupted in the test's own process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS, EVERY, PROTECTED, DEATH = 13, 3, 6, 8


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run does besides training.

    Attributes:
        directory: Where ranks write what they see.
        death: "worker": rank 1 kills itself after step `DEATH` of the first attempt. "node": it says where it is then,
            and waits to be killed from outside. "controller": the same, and the controller is killed. "plan": nothing
            here; faults are armed.
        template: What is restored into: "abstract" or "concrete".
        linger_s: How much longer than rank 0 the others are busy at the end.
    """

    directory: Path
    death: str
    template: str
    linger_s: float = 0.0


class Batches:
    """Random batches; the position is the state of a numpy generator, integers of 128 bits and all."""

    def __init__(self, rank: int) -> None:
        self.rank, self.taken, self._numbers = rank, 0, np.random.default_rng(3)

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        self.taken += 1
        return self._numbers.normal(size=(8, 16)).astype(np.float32), self._numbers.normal(size=(8, 32)).astype(
            np.float32
        )

    def get_state(self) -> dict[str, Any]:
        return {"rank": self.rank, "taken": self.taken, "numbers": self._numbers.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.rank, self.taken = state["rank"], state["taken"]
        self._numbers.bit_generator.state = state["numbers"]


class Training:
    """A layer whose matrix is sharded over all devices, with momentum and dropout."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        rows, self.everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
        self.shardings = dict.fromkeys(("w", "m", "half", "keys"), rows) | dict.fromkeys(
            ("b", "key", "zero"), self.everywhere
        )
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, self.everywhere))

    def init(self) -> dict[str, Any]:
        """The state before the first step."""
        import jax

        host = {"counts": np.zeros(4, np.int64), "step": 0, "rate": 0.125, "name": "small", "nothing": None}
        return {"arrays": jax.jit(_init, out_shardings=self.shardings)(), "host": host}

    def abstract(self) -> dict[str, Any]:
        """The same without content."""
        import jax

        shapes = jax.eval_shape(_init)
        arrays = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[k]) for k, x in shapes.items()}
        host = {"counts": np.zeros(4, np.int64), "step": 0, "rate": 0.0, "name": "", "nothing": None}
        return {"arrays": arrays, "host": host}

    def advance(self, state: dict[str, Any], batch: tuple[np.ndarray, np.ndarray]) -> tuple[dict[str, Any], Any]:
        """One step; the arrays are donated and the host's are changed in place."""
        import jax

        x, y = (
            jax.make_array_from_callback(part.shape, self.everywhere, lambda i, part=part: part[i]) for part in batch
        )
        arrays, loss = self.step(state["arrays"], x, y)
        state["host"]["counts"] += np.arange(4)
        return {"arrays": arrays, "host": state["host"] | {"step": state["host"]["step"] + 1}}, loss

    def _step(self, arrays: Any, x: Any, y: Any) -> Any:
        import jax
        import jax.numpy as jnp

        key, draw = jax.random.split(arrays["key"])

        def loss_of(w: Any, b: Any) -> Any:
            hidden = jnp.tanh(x @ w + b)
            kept = jnp.where(jax.random.bernoulli(draw, 0.5, hidden.shape), hidden, 0.0)
            return jnp.mean((kept - y) ** 2)

        # Gathered before it is used, so that no sum crosses devices: its order would depend on who runs where.
        w = jax.lax.with_sharding_constraint(arrays["w"], self.everywhere)
        loss, (dw, db) = jax.value_and_grad(loss_of, argnums=(0, 1))(w, arrays["b"])
        m = 0.5 * arrays["m"] + dw
        return {
            "w": arrays["w"] - 0.125 * m,
            "m": m,
            "b": arrays["b"] - 0.125 * db,
            "half": arrays["half"] * jnp.bfloat16(1.125),
            "key": key,
            "keys": jax.vmap(lambda k: jax.random.split(k)[1])(arrays["keys"]),
            "zero": arrays["zero"],
        }, loss

    def summary(self, state: dict[str, Any]) -> dict[str, Any]:
        """Every bit of a state, as JSON."""
        import jax

        plain = {
            name: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for name, x in state["arrays"].items()
        }
        plain = jax.jit(lambda x: x, out_shardings=self.everywhere)(plain)
        arrays = {name: [str(x.dtype), list(x.shape), np.asarray(x).tobytes().hex()] for name, x in plain.items()}
        return arrays | state["host"] | {"counts": state["host"]["counts"].tolist()}


def _init() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    first, second, key = jax.random.split(jax.random.key(7), 3)
    return {
        "w": jax.random.normal(first, (16, 32)),
        "m": jnp.zeros((16, 32)),
        "b": jnp.zeros(32),
        "half": jnp.ones(8, jnp.bfloat16),
        "key": key,
        "keys": jax.random.split(second, 4),
        "zero": jnp.zeros((0, 3)),
    }


def uninterrupted() -> tuple[list[str], dict[str, Any]]:
    """The losses of all steps, as exact text, and the final state."""
    training, batches, losses = Training(), Batches(0), []
    state = training.init()
    for _ in range(STEPS):
        state, loss = training.advance(state, next(batches))
        losses.append(float(loss).hex())
    return losses, training.summary(state)


def train(config: Config) -> None:
    """What each worker runs."""
    import jax
    import ray.train

    import ray_jax_ckpt as rjc

    rank = ray.train.get_context().get_world_rank()
    record = Record(config.directory, rank)
    checkpoint = ray.train.get_checkpoint()
    record.add("started", checkpoint=type(checkpoint).__name__, devices=[jax.local_device_count(), jax.device_count()])
    training, batches = Training(), Batches(rank)
    if checkpoint is None:
        state, start = training.init(), 0
    else:
        template = training.abstract() if config.template == "abstract" else training.init()
        restored = rjc.restore(checkpoint, template, data=batches)
        state, start = restored.state, restored.step
        seen = {other: data["taken"] for other, data in restored.data_by_rank.items()}
        position = {"rank": batches.rank, "taken": batches.taken, "seen": seen}
        record.add("restored", step=start, source=restored.source, metrics=dict(restored.metrics), data=position)
        del restored, template
    for step in range(start + 1, STEPS + 1):
        state, loss = training.advance(state, next(batches))
        rjc.snapshot(step, state, data=batches, metrics={"loss": loss})
        record.add("step", step=step, loss=float(loss).hex())
        if step == PROTECTED:
            rjc.wait()
            record.add("protected", latest=rjc.latest())
        if step == DEATH and checkpoint is None and rank == 1 and config.death != "plan":
            die(config, record)
    record.add("finished", state=training.summary(state), latest=rjc.latest())
    ray.train.report({"loss": float(loss)})
    time.sleep(config.linger_s if rank else 0.0)
    record.add("returned")


def die(config: Config, record: Record) -> None:
    """Ends this process, or has its node ended."""
    import ray

    if config.death == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    record.add("doomed", node=ray.get_runtime_context().get_node_id())
    time.sleep(600)


class Record:
    """What a rank saw in one attempt, a JSON object a line; readable at any time."""

    def __init__(self, directory: Path, rank: int) -> None:
        attempt = 1 + len(list(directory.glob(f"attempt-*-rank-{rank}.jsonl")))
        self._path = directory / f"attempt-{attempt}-rank-{rank}.jsonl"
        self._path.touch()

    def add(self, event: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


def read(directory: Path, attempt: int, rank: int, event: str) -> list[dict[str, Any]]:
    """What a rank recorded of an event in an attempt. A line that is being written does not count yet."""
    path = directory / f"attempt-{attempt}-rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text.split("\n")[:-1]
    return [found for found in map(json.loads, lines) if found["event"] == event]
