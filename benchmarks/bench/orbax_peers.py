"""What Orbax does with the same state in the same processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.snapshot import Bench

MAX_SAVES = MAX_LOADS = 3


def save_async(bench: Bench) -> None:
    """`orbax.checkpoint.v1.save_async` of the global state to the disk: until it returns, and until it is committed."""
    from orbax.checkpoint import v1

    for repeat in range(min(bench.plan.repeats, MAX_SAVES) + 1):
        bench.step()
        bench.barrier()
        prefix = "orbax save_async" if repeat else "first orbax save_async"
        path = bench.work / f"orbax{repeat}"
        with bench.samples.timed(f"{prefix} done"):
            with bench.samples.timed(f"{prefix} call"):
                response = v1.save_async(path, bench.state)
            response.result()
        bench.barrier()
        if bench.rank == 0:
            shutil.rmtree(path)


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


def snapshotter(bench: Bench) -> None:
    """Orbax's Snapshotter, every rank on its own part, all at the same time: as many bytes per process as ours."""
    from orbax.checkpoint.experimental.v1.training.pathways import Snapshotter

    peer = Snapshotter(replica_axis_index=0)

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
    for _ in range(bench.plan.loop_repeats if bench.plan.kind == "gpt2" else 0):
        for every, name in ((0, "none"), (1, "every step"), (0, "none")):
            with bench.loop(f"orbax Snapshotter loop {name}"):
                bench.steps(every, save)
            peer.join()
    _load(bench, peer, save)


def _load(bench: Bench, peer: Any, save: Callable[[], None]) -> None:
    """Once per snapshot: a second load of a kept one is not safe in this version of Orbax."""
    import jax

    from bench import workload

    target = workload.abstract(bench.state)
    for _ in range(MAX_LOADS):
        save()
        peer.join()
        bench.state = None
        bench.barrier()
        with bench.samples.timed("orbax Snapshotter load"):
            bench.state = jax.block_until_ready(peer.load(target))
