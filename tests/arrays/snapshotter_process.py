"""One of two processes, each with two CPU devices, that snapshot and load arrays spanning both. Run by a test."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays import pathways
from ray_jax_ckpt.arrays.replicas import ShardedLeaf
from ray_jax_ckpt.arrays.snapshotter import Snapshotter


def forbidden(*_args, **_kwargs):
    raise AssertionError("split called for an array that spans processes, which crashes the process")


def make(mesh, rows, *spec):
    content = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    return jax.make_array_from_callback(content.shape, NamedSharding(mesh, P(*spec)), lambda index: content[index])


def check(restored, rows, sharding):
    content = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    assert restored.sharding == sharding, restored.sharding
    assert len(restored.addressable_shards) == 2
    for shard in restored.addressable_shards:
        np.testing.assert_array_equal(shard.data, content[shard.index])


def main(port: str, rank: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "fsdp"))
    assert not NamedSharding(mesh, P()).is_fully_addressable
    pathways.functions = lambda: (forbidden, forbidden)
    state = {
        "fsdp": make(mesh, 8, "fsdp"),
        "rows": make(mesh, 8, ("replica", "fsdp")),
        "replicated": make(mesh, 4),
        "mine": jnp.full(3, rank),
    }
    step = jax.jit(lambda x: x - 1.0, donate_argnums=0)
    with Snapshotter() as snap:
        assert snap.save(3, state)
        donated = step(step(state["fsdp"]))
        snap.join()
        assert all(isinstance(leaf, ShardedLeaf) for leaf in snap._worker.latest.leaves.values())
        template = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in state.items()}
        for _ in range(2):
            restored = snap.load(template)
            for name, rows in (("fsdp", 8), ("rows", 8), ("replicated", 4)):
                check(restored[name], rows, template[name].sharding)
            assert restored["mine"].tolist() == [rank] * 3
        moved = NamedSharding(mesh, P(("fsdp", "replica")))
        template["rows"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=moved)
        check(snap.load(template)["rows"], 8, moved)
        del donated
        # Each process alone: its own shard of "fsdp" is lost, and no other process is asked for it.
        for piece in snap._worker.latest.leaves["['fsdp']"].pieces:
            if piece.box[0] == (0, 4):
                piece.data.delete()
        with pytest.raises(RuntimeError, match=r"\['fsdp'\]"):
            snap.load(template, reset_snapshot_state=False)
    print("all well", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
