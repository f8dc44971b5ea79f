"""Writes checkpoints with plain Orbax, by all ways that a reader may meet. Run as a process of its own."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FORMS = ("v1", "ocdbt", "zarr2", "zarr3", "ocdbt_zarr3")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))


def state() -> dict[str, Any]:
    """What both of Orbax's APIs save."""
    rows, columns = NamedSharding(mesh(), P("fsdp")), NamedSharding(mesh(), P(None, "replica"))
    return {
        "rows": jax.device_put(jnp.arange(64.0).reshape(8, 8), rows),
        "columns": jax.device_put(jnp.arange(24, dtype=jnp.int32).reshape(3, 8), columns),
        "half": jnp.full(3, 1.5, jnp.bfloat16),
        "zero_d": jnp.float32(2.5),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "numpy": np.arange(5, dtype=np.int16),
        "step": 7,
        "rate": 0.5,
        "flag": True,
        "name": "run-7",
        "none": None,
        "nothing": {"dict": {}, "list": [], "tuple": ()},
        "list": [jnp.zeros(2), {"a": jnp.ones(1)}],
        "tuple": (jnp.zeros(2), 3),
        "opt": optax.adam(1e-3).init({"x": jnp.ones(3)}),
    }


def text(value: str) -> dict[str, Any]:
    return {"__string__": True, "char_codes": [ord(c) for c in value]}


def key(value: jax.Array) -> dict[str, Any]:
    return {"__prng_key__": True, "key_data": jax.random.key_data(value).tolist()}


def marked() -> dict[str, Any]:
    """What Datarax 0.1.4 made of {"name": "train é", ..} with metadata, for Orbax to save."""
    metadata = {"epoch": 2, "note": text("hello"), "nested": {"a": [1, 2], "e": []}, "scores": np.arange(3)}
    return {
        "name": text("train é"),
        "empty": text(""),
        "rng": key(jax.random.key(5)),
        "keys": key(jax.random.split(jax.random.key(1), 3)),
        "array": jnp.ones((2, 2)),
        "index": 3,
        "nothing": None,
        "layers": {"0": jnp.zeros(1), "10": jnp.ones(1), "2": jnp.full(1, 2.0)},
        "list": [1, text("two"), jnp.zeros(2)],
        "__metadata__": metadata,
    }


class Model(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.norm, self.drop = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def main(root: str) -> None:
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    def save(name: str, tree: Any, **options: Any) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(f"{root}/{name}", args=ocp.args.PyTreeSave(tree))

    v1.save(f"{root}/v1", state())
    save("ocdbt", state(), use_ocdbt=True)
    save("zarr2", state(), use_ocdbt=False)
    save("zarr3", state(), use_ocdbt=False, use_zarr3=True)
    save("ocdbt_zarr3", state(), use_ocdbt=True, use_zarr3=True)
    v1.save(f"{root}/alone", jnp.arange(3))
    v1.save_checkpointables(f"{root}/several", {"one": {"w": jnp.ones(2)}, "two": {"w": jnp.zeros(2)}})
    with ocp.CheckpointManager(f"{root}/manager") as manager:
        for step in (3, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(2, step)}))
        manager.wait_until_finished()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{root}/datarax/ckpt-3", marked())
        checkpointer.save(f"{root}/datarax/12/default", marked() | {"index": 12})
        envelope = {"__state__": jnp.arange(3), "__metadata__": {"x": 1}}
        checkpointer.save(f"{root}/enveloped/checkpoint", envelope)
        model = nnx.to_pure_dict(nnx.state(Model(1)))
        model["drop"]["rngs"]["key"] = key(model["drop"]["rngs"]["key"])
        checkpointer.save(f"{root}/model/checkpoint", model)
    big = jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024), NamedSharding(mesh(), P("fsdp")))
    save("big", {"w": big}, use_ocdbt=False, use_zarr3=True)


if __name__ == "__main__":
    main(sys.argv[1])
