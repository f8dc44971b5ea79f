"""Measures snapshots and restores, beside what the machine, Orbax and stock Ray Train do in the same run.

    python benchmarks/run.py                                      every theme on its usual workload: about 15 minutes
    python benchmarks/run.py --theme capture --workload W1 W3     only these
    python benchmarks/run.py --compare benchmarks/results         each median beside the one of an earlier result
    python benchmarks/run.py --smoke                              tiny states, one repeat: does it work?

Themes: capture (the call, until complete and protected, loops of steps), restore (own node, other node), recovery (the
death of a worker), memory, leaves (5,000 small ones). Workloads: W1 1.5 GB in 444 leaves, W2 5,000 leaves of 1 KiB, W3
64 MB in 16 leaves.

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

USUAL = {"capture": "W1", "restore": "W1", "recovery": "W3", "memory": "W1", "leaves": "W2"}
WORKLOADS = ("W1", "W2", "W3")
OUT = Path(__file__).resolve().parent.parent / "out" / "benchmarks"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--theme", nargs="+", choices=(*USUAL, "all"), default=["all"], help="what to measure (default: all)")
    add("--workload", nargs="+", choices=WORKLOADS, help="states to measure it on (default: each theme's usual one)")
    add("--copies", nargs="+", type=int, default=[1, 2], help="of capture and memory (default: 1 2)")
    add("--staging", nargs="+", choices=("host", "device"), default=["host"], help="of capture (default: host)")
    add("--repeats", type=int, default=5, help="of every measurement (default: %(default)s)")
    add("--deaths", type=int, default=2, help="of a worker, per kind of run (default: %(default)s)")
    add("--gb", type=float, default=1.494, help="size of W1 (default: GPT-2 small with Adam)")
    add("--no-peers", action="store_true", help="leave Orbax and stock Ray Train out")
    add("--smoke", action="store_true", help="0.06 GB, one repeat")
    add("--out", type=Path, default=OUT, help="folder for the results (default: %(default)s)")
    add("--compare", type=Path, metavar="EARLIER", help="an earlier result file, or a folder of them")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.repeats, arguments.deaths, arguments.gb = 1, 1, 0.06
    if min(arguments.repeats, arguments.deaths, *arguments.copies) < 1 or arguments.gb <= 0:
        parser.error("--repeats, --deaths, --copies and --gb must be positive")
    if arguments.compare is not None and not arguments.compare.exists():
        parser.error(f"--compare: there is no {arguments.compare}")
    return arguments


def chosen(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The (theme, workload) pairs to measure. Leaves and recovery are about one workload each."""
    themes = list(USUAL) if "all" in arguments.theme else list(dict.fromkeys(arguments.theme))
    fixed = ("leaves", "recovery")
    return [
        (theme, workload)
        for theme in themes
        for workload in ([USUAL[theme]] if theme in fixed or not arguments.workload else arguments.workload)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the result files. Returns the exit code."""
    arguments = parse_arguments(argv)
    cluster.prepare_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a table is shown when it is done, also in a file
    from bench import plot, report, tables

    earlier = tables.load(arguments.compare) if arguments.compare else {}
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(arguments).items() if v is not None}
    start = time.monotonic()
    try:
        with cluster.own_cluster() as machines:
            for theme, workload in chosen(arguments):
                name = f"{theme}-{workload}"
                head = {"name": name, "machine": report.describe_machine(), "settings": settings}
                runs = measure(theme, workload, arguments, machines)
                result = head | {"load_average_after": os.getloadavg(), "runs": runs}
                _save(arguments.out / f"{name}.json", result)
                print("\n" + tables.markdown(result, earlier.get(name)))
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own way to take Ctrl-C, and SIGTERM
        print("interrupted; cluster and workers are shut down", file=sys.stderr)
        return 130
    results = tables.load(arguments.out)
    (arguments.out / "results.md").write_text(tables.page(results, earlier))
    plot.draw(results, arguments.out / "results.png")
    print(f"\n{time.monotonic() - start:.0f} s; tables, plot and all values: {arguments.out}")
    return 0


def measure(
    theme: str, workload: str, arguments: argparse.Namespace, machines: cluster.Machines
) -> dict[str, dict[str, Any]]:
    """The runs of one theme on one workload: what each measured, by name."""
    from bench import themes

    return getattr(themes, theme)(workload, arguments, machines)


def _save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
