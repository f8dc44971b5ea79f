"""Checks and measures snapshots on the devices that there are, in under five minutes on a GPU.

    python benchmarks/gpu_check.py                    a state of 3 GB
    JAX_PLATFORMS=cpu python benchmarks/gpu_check.py --gb 0.05 --steps 10     the same code where there is no GPU

Checked, bit for bit, with a step that donates its state right after: `rjc.Snapshotter`, and `rjc.snapshot` and
`rjc.restore` with both stagings. Measured: the step with and without a snapshot at every fifth step. It trains one
worker in a Ray cluster of its own, prints a table, and writes a JSON file. The exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import cluster

OUT = Path(__file__).resolve().parent.parent / "out" / "benchmarks" / "gpu_check.json"
EVERY = 5
STAGINGS = ("host", "device")
WAIT_S = 120.0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0, help="size of the state (default: %(default)s)")
    parser.add_argument("--step-s", type=float, default=0.25, help="duration of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of each measured loop (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="result file (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both trainings, prints, writes the result. Returns the exit code."""
    arguments = parse_arguments(argv)
    cluster.prepare_environment()
    from bench import report

    result: dict[str, Any] = {"machine": report.describe_machine(), "gb": arguments.gb, "runs": {}}
    with cluster.own_cluster(num_gpus=_num_gpus()) as machines:
        for staging in STAGINGS:
            result["runs"][staging] = _train(arguments, staging, machines.work / staging)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return _show(result)


def _num_gpus() -> int:
    """Asked without JAX: the driver must not take the devices that the worker needs."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 0
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia/gpus").is_dir() else 0


def _train(arguments: argparse.Namespace, staging: Any, work: Path) -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    import ray_jax_ckpt as rjc

    work.mkdir()
    use_gpu = _num_gpus() > 0
    config = {"gb": arguments.gb, "step_s": arguments.step_s, "steps": arguments.steps, "out": str(work / "found.json")}
    environment = {} if use_gpu else {"JAX_PLATFORMS": "cpu"}
    snapshot = rjc.SnapshotConfig(every_n_steps=1, copies=1, staging=staging)
    trainer = JaxTrainer(
        train_fn,
        train_loop_config=config,
        jax_config=rjc.JaxConfig(),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=use_gpu),
        run_config=RunConfig(
            name="run",
            storage_path=str(work),
            callbacks=[rjc.CheckpointManager(snapshot=snapshot)],
            worker_runtime_env={"env_vars": {**environment, "XDG_CACHE_HOME": str(work.parent / "cache")}},
        ),
    )
    cluster.fit(trainer)
    return json.loads((work / "found.json").read_text())


def train_fn(config: dict[str, Any]) -> None:
    """All checks and measurements of one staging, in a worker."""
    import jax
    from bench import workload

    import ray_jax_ckpt as rjc

    mesh = workload.make_mesh()
    step = workload.Step(mesh)
    state = workload.make_state(mesh, workload.gpt2_shapes(config["gb"]), "pmv")
    state = step.calibrate(state, config["step_s"], lambda number: number)
    found: dict[str, Any] = {"device": str(jax.devices()[0].device_kind), "platform": jax.default_backend()}
    found["state_bytes"] = workload.num_bytes(state)
    probe = {"state": state, "odd": odd_leaves()}
    found["memory kinds"] = sorted({memory.kind for memory in jax.devices()[0].addressable_memories()})
    wanted = bits(probe)
    with rjc.Snapshotter() as snapshotter:
        snapshotter.save(1, probe)
        probe = _overwritten(probe)
        snapshotter.join()
        restored = snapshotter.load(_abstract(probe), reset_snapshot_state=False)
        found["Snapshotter"] = differences(wanted, bits(restored))
        del restored
    found["snapshot"], probe = _check_snapshot(probe)
    found["seconds"] = _measure(step, probe["state"], config["steps"])
    Path(config["out"]).write_text(json.dumps(found))


def odd_leaves() -> dict[str, Any]:
    """What large matrices of float32 do not show: other types, all bit patterns, tiny leaves, keys, host memory."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    patterns = jnp.arange(2**16, dtype=jnp.uint16)
    floats = (jnp.bfloat16, jnp.float16)
    found = {np.dtype(x).name: jax.lax.bitcast_convert_type(patterns, x) for x in floats}
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        found[np.dtype(dtype).name] = jax.lax.bitcast_convert_type(jnp.arange(256).astype(jnp.uint8), dtype)
    tiny = {f"tiny{i:03d}": jnp.full((3, i % 7 + 1), i, jnp.float32) for i in range(300)}
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return found | {
        "bool": jnp.arange(9) % 2 == 0,
        "scalar": jnp.float32(2.5),
        "key": jax.random.key(3),
        "offloaded": jax.device_put(jnp.arange(1.0 * (1 << 18)), pinned),
        "tiny": tiny,
    }


def bits(state: Any) -> list[bytes]:
    """The bytes of every leaf, copied to the host."""
    import jax
    import numpy as np

    plain = [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in plain]


def leaves(state: Any) -> list[Any]:
    """In tree order."""
    import jax

    return jax.tree.leaves(state)


def differences(wanted: list[bytes], found: list[bytes]) -> dict[str, int]:
    """How many leaves differ."""
    return {"leaves": len(wanted), "different": sum(a != b for a, b in zip(wanted, found, strict=True))}


def _abstract(state: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _overwritten(state: Any) -> Any:
    """Another state in the memory of the one given, which is donated where it is on a device."""
    import jax
    import jax.numpy as jnp

    donating = jax.jit(lambda x: jnp.flip(x) if x.ndim else x, donate_argnums=0)

    def overwrite(x: Any) -> Any:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key or x.sharding.memory_kind == "pinned_host" else donating(x)

    return jax.tree.map(overwrite, state)


def _check_snapshot(probe: Any) -> tuple[dict[str, Any], Any]:
    """Three snapshots, each followed by steps that donate; the last one is compared. The first compiles."""
    import ray_jax_ckpt as rjc
    from ray_jax_ckpt import session

    current: Any = session.current()
    handle, wanted = None, []
    for number in range(1, 4):
        probe = _overwritten(probe)
        wanted = bits(probe)
        handle = rjc.snapshot(number, probe)
        probe = _overwritten(probe)
        rjc.wait(WAIT_S)
        staging = current._planner._plan.staging
        deadline = time.monotonic() + WAIT_S
        while staging.is_wanted and not staging.is_ready and time.monotonic() < deadline:
            time.sleep(0.05)
    start = time.perf_counter()
    restored = rjc.restore(handle, _abstract(probe))
    seconds = time.perf_counter() - start
    found = differences(wanted, bits(restored.state))
    # Restored arrays can be donated.
    _overwritten(restored.state)
    return {**found, "staged": staging.is_ready, "restore_s": seconds, "source": restored.source}, probe


def _measure(step: Any, state: Any, count: int) -> dict[str, Any]:
    """Seconds per step: without snapshots, with one at every fifth step, without again."""
    import ray_jax_ckpt as rjc

    number = 100
    series: dict[str, list[float]] = {"none": [], "every 5": [], "call": []}

    def loop(name: str, every: int, report: Callable[[float], None]) -> None:
        nonlocal state, number
        start = time.perf_counter()
        for i in range(1, count + 1):
            number += 1
            state = step(state, number)
            if every and i % every == 0:
                begun = time.perf_counter()
                rjc.snapshot(number, state)
                report(time.perf_counter() - begun)
        series[name].append((time.perf_counter() - start) / count)
        rjc.wait(WAIT_S)

    rjc.snapshot(number, state)
    rjc.wait(WAIT_S)
    for repeat in range(4):
        # The first round touches buffers and compiles.
        for name, every in (("none", 0), ("every 5", EVERY)):
            loop(name, every, series["call"].append)
        if repeat == 0:
            series = {name: [] for name in series}
    medians = {name: statistics.median(values) for name, values in series.items()}
    return {"median": medians, "ratio": medians["every 5"] / medians["none"], "values": series}


def _show(result: dict[str, Any]) -> int:
    print(f"{result['machine']['time']}, commit {result['machine']['commit']}")
    print(
        "| staging | device | state, GB | Snapshotter | snapshot | staged | step, ms | every 5th | ratio | call, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    bad = 0
    for staging, run in result["runs"].items():
        seconds = run["seconds"]["median"]
        checks = [f"{run[name]['different']} of {run[name]['leaves']} differ" for name in ("Snapshotter", "snapshot")]
        bad += run["Snapshotter"]["different"] + run["snapshot"]["different"] + (not run["snapshot"]["staged"])
        cells = [staging, run["device"], f"{run['state_bytes'] / 1e9:.2f}", *checks, run["snapshot"]["staged"]]
        cells += [f"{seconds[name] * 1e3:.1f}" for name in ("none", "every 5")]
        cells += [f"{run['seconds']['ratio']:.3f}", f"{seconds['call'] * 1e3:.1f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
