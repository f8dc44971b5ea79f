"""A training of one worker that reports one of its snapshots, to be validated."""

from __future__ import annotations

from pathlib import Path

import job

STEPS, REPORTED = 3, 2


def train(directory: Path) -> None:
    import jax
    import jax.numpy as jnp
    import ray.train

    import ray_jax_ckpt as rjc

    record = job.Record(directory, 0)
    checkpoint = ray.train.get_checkpoint()
    state, start = {"w": jnp.arange(1000.0)}, 0
    if checkpoint is not None:
        restored = rjc.restore(checkpoint, state)
        state, start = restored.state, restored.step
        record.add("restored", step=start, source=restored.source, first=float(state["w"][0]))
    for step in range(start + 1, STEPS + 1):
        state = jax.tree.map(lambda x: x + 1, state)
        handle = rjc.snapshot(step, state, force=step == REPORTED)
        rjc.wait()
        if step == REPORTED:
            ray.train.report({"step": step}, checkpoint=handle, validation=handle is not None)
    record.add("finished", latest=rjc.latest(), taken=handle is not None, platform=jax.default_backend())


def validate(checkpoint) -> dict:
    """What Ray runs beside the training, in a process of its own."""
    import ray_jax_ckpt as rjc

    restored = rjc.restore(checkpoint)
    return {"validated_step": restored.step, "first": float(restored.state["w"][0])}
