"""A training whose every bit is known at every step, for any number of processes: integers, and no order of sums."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

GLOBAL_BATCH, SAMPLES = 24, 48_000
EVERY, MARGIN = 2, 6
ELEMENTS = 24 * 2**17
# Of w and m, which are all that counts.
UNIQUE_BYTES = 2 * 4 * ELEMENTS


def order(rank: int, world_size: int) -> Any:
    """A rank's part of the global batches."""
    import grain
    from grain.experimental import ElasticIterator

    source = grain.MapDataset.source(np.arange(SAMPLES, dtype=np.int32)).shuffle(seed=5)
    return ElasticIterator(source, GLOBAL_BATCH, grain.sharding.ShardOptions(rank, world_size))


def same_position(states: Any, *, rank: int, world_size: int) -> Any:
    """All ranks have come equally far in one global order: any of them says where."""
    assert all(state == states[0] for state in states.values())
    return states[0]


class Training:
    """Two large arrays sharded over all devices, a small one and a key everywhere."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("d",))
        self.rows, self.everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
        self.shardings = {"w": self.rows, "m": self.rows, "b": self.everywhere, "key": self.everywhere}
        self.step = jax.jit(advance, donate_argnums=0, out_shardings=self.shardings)

    def init(self) -> dict[str, Any]:
        import jax

        return jax.jit(start, out_shardings=self.shardings)()

    def abstract(self) -> dict[str, Any]:
        import jax

        shapes = jax.eval_shape(start)
        return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[k]) for k, x in shapes.items()}

    def batch(self, ids: np.ndarray) -> Any:
        import jax

        return jax.make_array_from_process_local_data(self.rows, ids, (GLOBAL_BATCH,))


def start() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    w = jax.lax.iota(jnp.uint32, ELEMENTS)
    return {"w": w, "m": w * jnp.uint32(7), "b": jnp.ones(8, jnp.bfloat16), "key": jax.random.key(3)}


def advance(state: dict[str, Any], ids: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    seen = jnp.sum((ids * ids).astype(jnp.uint32), dtype=jnp.uint32)
    w = state["w"] * jnp.uint32(1664525) + seen
    m = state["m"] ^ (w >> jnp.uint32(3))
    return {"w": w, "m": m, "b": state["b"] * jnp.bfloat16(1.125), "key": jax.random.split(state["key"])[1]}


def pieces(state: dict[str, Any]) -> list[list[Any]]:
    """Name, type, range and digest of what this process has of every array."""
    import jax

    plain = state | {"key": jax.random.key_data(state["key"])}
    return [
        [name, str(x.dtype), *_range(shard.index, x.shape), digest(np.asarray(shard.data))]
        for name, x in plain.items()
        for shard in x.addressable_shards
    ]


def _range(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    first, stop, _ = index[0].indices(shape[0])
    return first, stop


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def train(directory: Path) -> None:
    """What each worker runs: until it is killed, or in the group that has grown again for some more steps."""
    import jax
    import ray
    import ray.train

    import ray_jax_ckpt as rjc
    from ray_jax_ckpt.session import current

    context = ray.train.get_context()
    rank, world_size, attempt = context.get_world_rank(), context.get_world_size(), current().decision.attempt
    path = directory / f"attempt-{attempt}-rank-{rank}.jsonl"

    def record(event: str, **fields: Any) -> None:
        head = {"event": event, "attempt": attempt, "rank": rank, "world_size": world_size}
        with path.open("a") as file:
            file.write(json.dumps(head | fields) + "\n")

    record("started", node=ray.get_runtime_context().get_node_id(), devices=jax.device_count())
    training, batches, first = Training(), {"train": order(rank, world_size)}, 0
    if (checkpoint := ray.train.get_checkpoint()) is None:
        state = training.init()
    else:
        restored = rjc.restore(checkpoint, training.abstract(), data=batches, reshard_data=same_position)
        state, first = restored.state, restored.step
        record("restored", step=first, source=restored.source, data=restored.data, pieces=pieces(state))
        del restored
    step, last = first, None
    while last is None or step < last:
        assert not (directory / "over").exists(), "the test has failed"
        step += 1
        ids = next(batches["train"])
        state = training.step(state, training.batch(ids))
        rjc.snapshot(step, state, data=batches)
        record("step", step=step, ids=np.asarray(ids).tolist())
        if step == first + MARGIN - first % EVERY:
            rjc.wait()
            record("protected", latest=rjc.latest())
            if world_size == 4 and first:
                last = step + 2
        # Without it the loop would run far ahead of the test, which looks every now and then.
        time.sleep(0.15)
    record("finished", step=step, pieces=pieces(state))


def read(directory: Path, event: str) -> list[dict[str, Any]]:
    """What ranks recorded of an event in all attempts. A line that is being written does not count yet."""
    found = []
    for path in sorted(directory.glob("attempt-*.jsonl")):
        found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [each for each in found if each["event"] == event]
