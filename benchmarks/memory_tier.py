"""Measures the memory tier, beside what the machine, Orbax and stock Ray Train do in the same run.

    python benchmarks/memory_tier.py                       everything: about ten minutes on two idle cores
    python benchmarks/memory_tier.py --smoke               a tiny state, one repeat: does it work?
    python benchmarks/memory_tier.py --only recovery       a part: snapshot, protected, leaves, recovery

snapshot: one copy of the state on its own node: snapshots, loops, local restores, memory, Orbax on the same state.
protected: two copies on two nodes: the same, and restores from the other node.
leaves: 5,000 leaves of 1 KiB.
recovery: the death of a worker, with snapshots in memory and with stock Ray Train and Orbax.

It starts its own cluster on this machine and ends it. Times are those of the slower of two ranks; every reference is
measured in the same processes, at the same time as in ours, on as many bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import cluster

PARTS = ("snapshot", "protected", "leaves", "recovery")
SMOKE_PARTS = ("protected", "recovery")
OUT = Path(__file__).resolve().parent.parent / "out" / "benchmarks"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement (default: %(default)s)")
    parser.add_argument("--deaths", type=int, default=2, help="of a worker, per kind of run (default: %(default)s)")
    parser.add_argument("--gb", type=float, default=1.494, help="size of the state (default: GPT-2 small with Adam)")
    parser.add_argument("--smoke", action="store_true", help="0.06 GB, one repeat, half of the parts")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for a result file per part (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.repeats, arguments.deaths, arguments.gb = 1, 1, 0.06
    arguments.only = arguments.only or (SMOKE_PARTS if arguments.smoke else PARTS)
    if arguments.repeats < 1 or arguments.deaths < 1 or arguments.gb <= 0:
        parser.error("--repeats, --deaths and --gb must be positive")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the result files. Returns the exit code."""
    arguments = parse_arguments(argv)
    cluster.prepare_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a part is shown when it is done, also in a file
    from bench import report

    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    start = time.monotonic()
    try:
        with cluster.own_cluster() as machines:
            for part in arguments.only:
                head = {"machine": report.describe_machine(), "settings": settings}
                result = PARTS_BY_NAME[part](arguments, machines)
                _save(arguments.out / f"{part}.json", head | {"load_average_after": os.getloadavg(), part: result})
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own way to take Ctrl-C, and SIGTERM
        print("interrupted; cluster and workers are shut down", file=sys.stderr)
        return 130
    print(f"\n{time.monotonic() - start:.0f} s; all values: {arguments.out}")
    return 0


def measure_snapshot(arguments: argparse.Namespace, machines: cluster.Machines) -> dict[str, Any]:
    """One copy."""
    parts = ("memory", "loops", "restore", "phases", "machine", "orbax")
    return _measure_run("snapshot", "gpt2", 1, parts, arguments, machines)


def measure_protected(arguments: argparse.Namespace, machines: cluster.Machines) -> dict[str, Any]:
    """Two copies."""
    parts = ("memory", "loops", "restore", "peer", "phases", "machine", *(["orbax"] if arguments.smoke else []))
    return _measure_run("protected", "gpt2", 2, parts, arguments, machines)


def measure_leaves(arguments: argparse.Namespace, machines: cluster.Machines) -> dict[str, Any]:
    """Many small leaves."""
    return _measure_run("leaves", "small", 1, ("restore", "phases", "orbax"), arguments, machines)


def _measure_run(
    name: str,
    kind: str,
    copies: int,
    parts: tuple[str, ...],
    arguments: argparse.Namespace,
    machines: cluster.Machines,
) -> dict[str, Any]:
    from bench import report, snapshot

    loops = {"loop_steps": 5, "loop_repeats": 1} if arguments.smoke else {}
    plan = snapshot.Plan(name, kind, arguments.gb, copies, parts, arguments.repeats, **loops)
    found = snapshot.run(plan, machines)
    summary = report.summarize_run(found)
    report.show_run(f"{name} (copies={copies})", summary)
    if "memory" in parts:
        summary["memory"] = report.summarize_memory(found["facts"], copies)
        report.show_memory(name, found["facts"], summary["memory"])
    return summary | {"plan": vars(plan), "values": found["series"]}


def measure_recovery(arguments: argparse.Namespace, machines: cluster.Machines) -> dict[str, Any]:
    """Both kinds of runs, one after the other."""
    from bench import recovery, report

    every = 5
    # Three steps after a snapshot, and late enough for one more to follow the recovery from the death before.
    deaths = tuple(4 * every + 4 + 4 * every * i for i in range(arguments.deaths))
    runs = {}
    for name, ours in (("ray_jax_ckpt", True), *([] if arguments.smoke else [("stock", False)])):
        runs[name] = recovery.run(recovery.Plan(f"recovery-{name}", ours, every, deaths), machines)
    report.show_recovery(runs)
    medians = {name: report.summarize_recovery(found) for name, found in runs.items()}
    result = {"medians": medians, "values": runs, "every": every, "deaths": deaths}
    if "stock" in medians:
        result["ratio"] = round(medians["ray_jax_ckpt"]["total"]["median"] / medians["stock"]["total"]["median"], 3)
        print(f"  ray_jax_ckpt / stock {result['ratio']:.2f}")
    return result


PARTS_BY_NAME = {
    "snapshot": measure_snapshot,
    "protected": measure_protected,
    "leaves": measure_leaves,
    "recovery": measure_recovery,
}


def _save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
