"""A large group on paper: what its planning costs, who sends how much to whom, and how many messages a snapshot takes.

No process, device or byte moves: the functions that the package runs are given the shards of a group that does not
exist. Times are CPU seconds of one process that plans for one rank (placement, recovery), or runs the coordinator.

    python benchmarks/scale.py --workers 1000 --leaves 1000 --per-node 8 --output benchmarks/results/scale.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench.paper import Paper, simulate
from bench.report import describe_machine, show


def main() -> None:
    """Simulates every sharding and prints, or writes, what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4], help="data-parallel replicas of the state")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {"machine": describe_machine(), "shardings": {}}
    for replicas in options.replicas:
        paper = Paper(options.workers, options.per_node, options.leaves, replicas, options.copies)
        results["shardings"][f"{replicas} replica(s) x {paper.shards} shards"] = simulate(paper)
    show(results, options.output)


if __name__ == "__main__":
    main()
