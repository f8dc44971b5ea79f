"""One of two processes, each with two CPU devices, that snapshot and load arrays spanning both. Run by a test."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays import pathways, tree
from ray_jax_ckpt.arrays.plan import Planner, Topology, capture
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


def capture_alone(state, rank):
    """One process stages, the other does not even compile: a copy on devices needs nobody else."""
    topology = Topology(rank, ("a", "b"), 1)
    planner = Planner(topology, on_device=True)
    flat = tree.flatten(state | {"small": [jnp.full(3, i) for i in range(20)]})
    plan = planner.plan(flat)
    if rank == 0:
        plan.staging.compile()
        assert plan.staging.is_ready
    captured = capture(plan, flat)
    assert bool(captured.staged) == (rank == 0)
    state["rows"].delete()
    buffer = np.empty(plan.layout.num_bytes, np.uint8)
    captured.write(buffer, lambda target, source: np.copyto(target, source) or "")
    content = np.arange(32, dtype=np.float32).reshape(8, 4)
    rows = [(p, i) for p in plan.layout.parts for i in p.items if flat.paths[i.leaf] == "['rows']"]
    assert len(rows) == 2
    for part, item in rows:
        start = part.offset + item.offset
        found = buffer[start : start + item.num_bytes].view(np.float32).reshape(2, 4)
        np.testing.assert_array_equal(found, content[slice(*item.box[0])])


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
    capture_alone({"rows": make(mesh, 8, ("replica", "fsdp"))}, rank)
    print("all well", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
