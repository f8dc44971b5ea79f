"""What Orbax does with the same state in the same processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.snapshot import Bench

MAX_SAVES, MAX_LOADS = 2, 3
TMPFS = Path("/dev/shm")
# While it saves, Orbax's copies and files take a few times the state.
ROOM = 4


def folders(work: Path) -> dict[str, Path]:
    """Where checkpoints go: on the disk, and in memory if there is a file system for that."""
    return {"disk": work} | ({"tmpfs": TMPFS / f"{work.parent.name}-{work.name}"} if TMPFS.is_dir() else {})


def save_async(bench: Bench, where: str, folder: Path) -> None:
    """`orbax.checkpoint.v1.save_async` of the global state: until it returns, and until it is committed."""
    from orbax.checkpoint import v1

    if shutil.disk_usage(folder if folder.is_dir() else folder.parent).free < ROOM * bench.num_bytes:
        return
    for repeat in range(min(bench.plan.repeats, MAX_SAVES) + 1):
        bench.step()
        bench.barrier()
        prefix = f"orbax save_async {where}" if repeat else f"first orbax save_async {where}"
        path = folder / f"orbax{repeat}"
        try:
            with bench.samples.timed(f"{prefix} done"):
                with bench.samples.timed(f"{prefix} call"):
                    response = v1.save_async(path, bench.state)
                response.result()
            bench.barrier()
        finally:
            if bench.rank == 0:
                shutil.rmtree(path if folder == bench.work else folder, ignore_errors=True)
    bench.barrier()


def to_local(bench: Bench) -> Any:
    """This rank's part of the state: Orbax's Snapshotter takes arrays of one process only."""
    import jax

    from bench import workload

    mesh = workload.make_mesh(jax.local_devices())
    state = workload.local_part(bench.state, mesh)
    products = bench.step_function.num_products
    bench.step_function = workload.Step(mesh)
    bench.step_function.num_products = products
    return state


def new_peer() -> Any:
    """Orbax's Snapshotter."""
    from orbax.checkpoint.experimental.v1.training.pathways import Snapshotter

    return Snapshotter(replica_axis_index=0)


def snapshotter(bench: Bench) -> Any:
    """Orbax's Snapshotter, every rank on its own part, all at the same time: as many bytes per process as ours."""
    peer = new_peer()

    def save() -> None:
        peer.save(bench.number, bench.state)

    for repeat in range(bench.plan.repeats + 2):
        bench.step()
        bench.barrier()
        prefix = "orbax Snapshotter" if repeat >= 2 else "first orbax Snapshotter"
        with bench.samples.timed(f"{prefix} done"):
            with bench.samples.timed(f"{prefix} call"):
                save()
            peer.join()
    for _ in range(bench.plan.loop_repeats if bench.has_steps else 0):
        for every, name in ((0, "none"), (1, "every step"), (5, "every 5 steps"), (0, "none")):
            with bench.loop(f"orbax Snapshotter loop {name}"):
                bench.steps(every, save)
            peer.join()
    return peer


def load(bench: Bench, peer: Any | None) -> None:
    """Once per snapshot: a second load of a kept one is not safe in this version of Orbax."""
    import jax

    from bench import workload

    peer = new_peer() if peer is None else peer
    target = workload.abstract(bench.state)
    for repeat in range(MAX_LOADS):
        peer.save(bench.number, bench.state)
        peer.join()
        bench.state = None
        bench.barrier()
        with bench.samples.timed("orbax Snapshotter load" if repeat else "first orbax Snapshotter load"):
            bench.state = jax.block_until_ready(peer.load(target))
