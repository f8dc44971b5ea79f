"""Restores a state from storage in several ways and prints what each took at most, beyond what was there before."""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from written import hold, write

from ray_jax_ckpt.arrays import assemble
from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.storage.restore import load

MB = 1 << 20
LEAVES, LEAF_BYTES, LARGE_BYTES = 40, 2 * MB, 64 * MB
BATCH_BYTES = 8 * MB
TOTAL_BYTES = LEAVES * LEAF_BYTES + LARGE_BYTES
STREAMS = 2


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def peak(where: Path, template: Any) -> int:
    """What a restore takes."""
    load(where, {"x0": template["x0"]}, partial=True, streams=STREAMS)
    # What was freed so far would hide what is taken next.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    try:
        restored = load(where, template, streams=STREAMS).state
        jax.block_until_ready(list(restored.values()))
    except CheckpointError:
        pass
    return status("VmHWM") - before


def bomb(where: Path, original: Path) -> None:
    """A chunk that decodes to much more than it should."""
    os.system(f"cp -r {original} {where}")
    chunk = where / "x1" / "0.0"
    meta = json.loads((where / "x1" / ".zarray").read_text())
    meta["compressor"] = {"id": "gzip", "level": 1}
    (where / "x1" / ".zarray").write_text(json.dumps(meta))
    chunk.write_bytes(gzip.compress(bytes(400 * MB), 1))


def main(root: Path) -> dict[str, int]:
    import orbax.checkpoint as ocp

    rows, columns = (NamedSharding(Mesh(np.array(jax.devices()[:4]), "a"), spec) for spec in (P("a"), P(None, "a")))
    draw = np.random.default_rng(0)
    sizes = {**{f"x{n}": LEAF_BYTES for n in range(LEAVES)}, "large": LARGE_BYTES}
    state = {k: jax.device_put(draw.integers(0, 256, (1024, n >> 10), np.uint8), rows) for k, n in sizes.items()}
    same = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for k, x in state.items()}
    across = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns) for k, x in state.items()}
    write(hold(state), root / "ours")
    write(hold(state, ocdbt=True), root / "database")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(root / "orbax", args=ocp.args.PyTreeSave(state))
    del state
    bomb(root / "bomb", root / "orbax")
    assemble.BATCH_BYTES = BATCH_BYTES
    return {
        "ours": peak(root / "ours", same),
        "ours, another mesh": peak(root / "ours", across),
        "database": peak(root / "database", same),
        "orbax": peak(root / "orbax", same),
        "orbax, another mesh": peak(root / "orbax", across),
        "bomb": peak(root / "bomb", {"x1": same["x1"], "x0": same["x0"]} | {k: same[k] for k in same}),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
