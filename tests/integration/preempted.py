"""A training that needs no collectives, so that a rank can go on when another one's node is taken away."""

from __future__ import annotations

import time
from pathlib import Path

import job
import numpy as np

NEVER = 10**6
EXTRA_STEPS = 5


def train(directory: Path) -> None:
    """What each worker runs: it counts, and takes a snapshot only where one is announced."""
    import jax
    import ray.train
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ray_jax_ckpt as rjc

    rank = ray.train.get_context().get_world_rank()
    record = job.Record(directory, rank)
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    zeros = np.zeros(1000, np.int32)
    state = {"count": jax.make_array_from_callback(zeros.shape, everywhere, lambda index: zeros[index])}
    checkpoint, start = ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        restored = rjc.restore(checkpoint, state)
        state, start = restored.state, restored.step
        count = np.asarray(state["count"].addressable_data(0))
        record.add("restored", step=start, counts=np.unique(count).tolist(), source=restored.source)
    record.add("started", node=ray.get_runtime_context().get_node_id())
    advance = jax.jit(lambda state: {"count": state["count"] + 1})
    for step in range(start + 1, NEVER if checkpoint is None else start + EXTRA_STEPS):
        state = advance(state)
        jax.block_until_ready(state)
        handle = rjc.snapshot(step, state)
        record.add("step", step=step, at=time.time(), taken=handle is not None)
        time.sleep(0.05)
