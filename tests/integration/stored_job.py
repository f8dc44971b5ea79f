"""A training that reports some of its snapshots, while the stores write others by themselves."""

from __future__ import annotations

from pathlib import Path

import job
import numpy as np

STEPS, REPORTED = 12, 4


def train(directory: Path, last: int) -> None:
    """What each worker runs: it counts up to a step."""
    import jax
    import ray.train
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ray_jax_ckpt as rjc

    rank = ray.train.get_context().get_world_rank()
    record = job.Record(directory, rank)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    zeros = np.zeros(1000, np.int32)
    count = jax.make_array_from_callback(zeros.shape, rows, lambda index: zeros[index])
    state, start = {"count": count, "step": 0, "key": jax.random.key(5)}, 0
    position = {"taken": 0}
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        restored = rjc.restore(checkpoint, state)
        state, start, position = restored.state, restored.step, restored.data
        values = np.concatenate([np.asarray(shard.data) for shard in state["count"].addressable_shards])
        record.add("restored", step=start, counts=np.unique(values).tolist(), source=restored.source, data=position)
    advance = jax.jit(lambda count: count + 1)
    for step in range(start + 1, last + 1):
        state = {"count": advance(state["count"]), "step": step, "key": state["key"]}
        position = {"taken": step * 10 + rank}
        reports = step % REPORTED == 0
        handle = rjc.snapshot(step, state, data=position, metrics={"loss": 1.0 / step}, force=reports)
        if reports:
            mode = "ASYNC" if step % (2 * REPORTED) else "SYNC"
            upload = ray.train.CheckpointUploadMode[mode]
            ray.train.report({"loss": 1.0 / step, "step": step}, checkpoint=handle, checkpoint_upload_mode=upload)
            known = rjc.checkpoints(consistency="committed", timeout_s=60)
            record.add("listed", step=step, reported=[one.step for one in known if one.origin == "report"])
