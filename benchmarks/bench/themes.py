"""What is run for each theme."""

from __future__ import annotations

import argparse
from typing import Any

from bench import recovery as deaths
from bench import report, snapshot
from bench.cluster import Machines

Runs = dict[str, dict[str, Any]]


def capture(workload: str, arguments: argparse.Namespace, machines: Machines) -> Runs:
    """Snapshots, and steps with and without them, per number of copies and staging; Orbax beside the first."""
    runs: Runs = {}
    for copies in arguments.copies:
        for staging in arguments.staging:
            peers = () if runs else _peers(arguments, "machine", "save_async", "snapshotter")
            # A step that touches thousands of leaves would measure XLA.
            loops = () if workload == "W2" else ("loops",)
            parts = ("snapshot_phases", *loops, *peers)
            runs[f"copies={copies} {staging}"] = _run("capture", workload, copies, staging, parts, arguments, machines)
    return runs


def restore(workload: str, arguments: argparse.Namespace, machines: Machines) -> Runs:
    """Two copies: restores from the own node and from the other one."""
    parts = ("restore", "peer", "restore_phases", "machine", *_peers(arguments, "loads"))
    return {"copies=2": _run("restore", workload, 2, "host", parts, arguments, machines)}


def memory(workload: str, arguments: argparse.Namespace, machines: Machines) -> Runs:
    """What the processes of a run hold, per number of copies."""
    runs: Runs = {}
    for copies in arguments.copies:
        found = _run("memory", workload, copies, "host", ("memory",), arguments, machines)
        found["memory"] = report.summarize_memory(found["facts"], copies)
        runs[f"copies={copies}"] = found
    return runs


def leaves(workload: str, arguments: argparse.Namespace, machines: Machines) -> Runs:
    """Many small leaves, one copy."""
    parts = ("snapshot_phases", "restore", "restore_phases", *_peers(arguments, "snapshotter", "loads"))
    return {"copies=1": _run("leaves", workload, 1, "host", parts, arguments, machines)}


def recovery(workload: str, arguments: argparse.Namespace, machines: Machines) -> Runs:
    """The death of a worker: this package, then stock Ray Train with Orbax."""
    every = 5
    # Three steps after a snapshot, and late enough for one more to follow the recovery from the death before.
    steps = tuple(4 * every + 4 + 4 * every * i for i in range(arguments.deaths))
    kinds = {"ray_jax_ckpt": True} | ({} if arguments.no_peers else {"stock Ray Train + Orbax": False})
    runs: Runs = {}
    for number, (name, ours) in enumerate(kinds.items()):
        found = deaths.run(deaths.Plan(f"recovery{number}", ours, every, steps), machines)
        runs[name] = {"seconds": report.summarize_recovery(found), "values": found}
    return runs


def _peers(arguments: argparse.Namespace, *parts: str) -> tuple[str, ...]:
    return () if arguments.no_peers else parts


def _run(
    theme: str,
    workload: str,
    copies: int,
    staging: str,
    parts: tuple[str, ...],
    arguments: argparse.Namespace,
    machines: Machines,
) -> dict[str, Any]:
    loops = {"loop_steps": 5, "loop_repeats": 1} if arguments.smoke else {}
    name = f"{theme}{workload}c{copies}{staging}"
    plan = snapshot.Plan(name, workload, arguments.gb, copies, parts, arguments.repeats, staging, **loops)
    found = snapshot.run(plan, machines)
    return report.summarize_run(found) | {"plan": vars(plan), "values": found["series"]}
