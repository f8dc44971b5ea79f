"""Restores a state in several ways and prints what each took at most, beyond what was there before, in bytes."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from virtual_group import MemoryReader, snapshot

from ray_jax_ckpt.arrays import assemble
from ray_jax_ckpt.arrays.assemble import Assembler, Options

MB = 1 << 20
LEAVES, LEAF_BYTES, LARGE_BYTES = 40, 2 * MB, 64 * MB
BATCH_BYTES = 8 * MB
TOTAL_BYTES = LEAVES * LEAF_BYTES + LARGE_BYTES


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def peak(batch_bytes: int, node: int) -> int:
    """Restores from the own node's memory (0) or another one's."""
    mesh = Mesh(np.array(jax.devices()[:4]), "a")
    sharding = NamedSharding(mesh, P("a"))
    state = {f"x{n}": jax.device_put(np.full(LEAF_BYTES, n, np.uint8), sharding) for n in range(LEAVES)}
    # Most of the state in one leaf, as with stacked layers.
    state["large"] = jax.device_put(np.full(LARGE_BYTES, 255, np.uint8), sharding)
    template: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    stores = snapshot(state, processes=1, per_process=4, copies=1)
    del state
    assembler, assemble.BATCH_BYTES = Assembler(stores.indices, 0, 1), batch_bytes
    small = {"x0": template["x0"]}
    assembler.restore(small, None, Options(partial=True), MemoryReader(stores, node).fetch)
    # What was freed so far would hide what is taken next.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    restored = assembler.restore(template, None, Options(), MemoryReader(stores, node).fetch)
    most = status("VmHWM") - before
    assert all(x.is_fully_addressable for x in jax.block_until_ready(list(restored.values())))
    return most


if __name__ == "__main__":
    ways = {"own node": (BATCH_BYTES, 0), "other node": (BATCH_BYTES, 100), "one batch": (1 << 40, 100)}
    print(json.dumps({name: peak(*way) for name, way in ways.items()}))
