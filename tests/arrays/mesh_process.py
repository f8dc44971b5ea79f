"""One of several real processes that take a generation of arrays spanning all of them, or restore one. Run by a test.

Stores are files: each process writes its buffer and its index, and reads those of all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stored_state import digested
from virtual_group import GENERATION, MemoryReader, VirtualStores

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.arrays.plan import Planner, Topology, capture
from ray_jax_ckpt.model.index import Index

ROWS, COLUMNS = 12, 6
CONTENTS: dict[str, np.ndarray] = {
    "w": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
    "half": np.arange(ROWS * 4).reshape(ROWS, 4).astype(jnp.bfloat16),
    "bias": np.arange(5, dtype=np.int32),
}
SAVED: dict[str, Any] = {"w": P("a", "b"), "half": P(("b", "a")), "bias": P()}
RESTORED: dict[str, Any] = {"w": P(None, "z"), "half": P("z"), "bias": P()}


def save(directory: Path, rank: int, world_size: int) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(world_size, -1), ("a", "b"))
    state: dict[str, Any] = {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, SAVED[name]), lambda index, x=x: x[index])
        for name, x in CONTENTS.items()
    }
    flat = tree.flatten(state | {"step": 7})
    topology = Topology(rank, tuple(f"d{i}" for i in range(world_size)), 1)
    plan = Planner(topology).plan(flat)
    buffer = np.empty(plan.layout.num_bytes, np.uint8)
    captured = capture(plan, flat)
    index = Index(GENERATION, plan.layout, captured.write(buffer, digested), captured.values)
    np.save(directory / f"{rank}.npy", buffer)
    (directory / f"{rank}.json").write_bytes(index.to_bytes())


def stored(directory: Path) -> VirtualStores:
    """What the processes that saved have left; each store is named by its rank."""
    indices = [Index.from_bytes(path.read_bytes()) for path in sorted(directory.glob("*.json"))]
    parts = {}
    for index in indices:
        buffer = np.load(directory / f"{index.layout.rank}.npy")
        places = {part.id: (part.offset, part.num_bytes) for part in index.layout.parts}
        parts[str(index.layout.rank)] = {part: buffer[at : at + size] for part, (at, size) in places.items()}
    return VirtualStores(indices, parts)


def restore(directory: Path, rank: int, world_size: int) -> None:
    """Onto one line of all devices; every shard is compared with a slice of the original."""
    mesh, stores = Mesh(np.array(jax.devices()), "z"), stored(directory)
    template: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, RESTORED[name]))
        for name, x in CONTENTS.items()
    }
    # Ranks on the nodes of others.
    reader = MemoryReader(stores, (rank + 1) % world_size)
    assembler = Assembler(stores.indices, rank, world_size)
    found = assembler.restore(template | {"step": 0}, None, Options(), reader.fetch)
    assert found.pop("step") == 7
    for name, array in found.items():
        assert array.sharding == template[name].sharding
        assert len(array.addressable_shards) == jax.local_device_count()
        for shard in array.addressable_shards:
            content = np.asarray(shard.data)
            assert content.dtype == CONTENTS[name].dtype
            assert content.tobytes() == CONTENTS[name][shard.index].tobytes()
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(found["w"])
    assert float(total) == CONTENTS["w"].sum()


def main(role: str, directory: str, port: str, rank: int, world_size: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world_size, rank, initialization_timeout=60)
    {"save": save, "restore": restore}[role](Path(directory), rank, world_size)
    print("all well", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
