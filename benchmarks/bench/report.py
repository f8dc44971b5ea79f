"""The result file's head, and the tables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.recovery import PHASES
from bench.samples import spread
from bench.snapshot import NUM_WORKERS

PACKAGES = ("ray", "jax", "jaxlib", "orbax-checkpoint", "pathwaysutils", "pyarrow", "numpy", "xxhash")
ROOT = Path(__file__).resolve().parents[2]
MS, GB = 1e3, 1e9
RATED = ("restore local", "restore peer", "first restore", "memcpy", "xxh3", "socket", "orbax Snapshotter load")


def describe_machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "package_changed": bool(_git("status", "--porcelain", "--", "ray_jax_ckpt")),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "system": platform.platform(),
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / GB, 1),
        "load_average": os.getloadavg(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def summarize_run(result: dict[str, Any]) -> dict[str, Any]:
    """Medians of a training run, with the ratios that the targets are about."""
    series, facts = result["series"], result["facts"]
    summary: dict[str, Any] = {"facts": facts, "seconds": {name: spread(values) for name, values in series.items()}}
    median = {name: found["median"] for name, found in summary["seconds"].items() if found}
    summary["loop_ratios"] = {
        name: round(median[name] / median[name.rsplit("loop", 1)[0] + "loop none"], 3)
        for name in median
        if "loop every" in name
    }
    own = facts["state_bytes"] / NUM_WORKERS
    sizes = {name: own for name in median if name.startswith(RATED)}
    sizes |= {name: facts["stream_bytes"] for name in median if name.startswith("flight")}
    summary["gb_per_s_per_rank"] = {name: round(size / GB / median[name], 2) for name, size in sizes.items()}
    summary["ratios"] = _ratios(summary["gb_per_s_per_rank"], median)
    return summary


def _ratios(rates: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """Times as multiples of the reference in the same run: above 1 is slower."""
    pairs = (
        ("restore local", "memcpy cold"),
        ("restore local", "memcpy warm"),
        ("restore peer", "socket, both ranks"),
        ("flight, one stream", "socket, one stream"),
    )
    ratios = {f"{a} / {b}": rates[b] / rates[a] for a, b in pairs if a in rates and b in rates}
    times = (
        ("call", "orbax save_async call"),
        ("call", "orbax Snapshotter call"),
        ("complete", "orbax Snapshotter done"),
        ("restore local", "orbax Snapshotter load"),
    )
    ratios |= {f"{a} / {b}": seconds[a] / seconds[b] for a, b in times if a in seconds and b in seconds}
    return {name: round(value, 3) for name, value in ratios.items()}


def stated_bytes(state_bytes: int, copies: int) -> dict[str, int]:
    """What the documentation says that snapshots take on all nodes: two buffers per copy, and one staging copy."""
    segments = 2 * copies * state_bytes
    return {"segments": segments, "staging": state_bytes, "total": segments + state_bytes}


def summarize_memory(facts: dict[str, Any], copies: int) -> dict[str, Any]:
    """Growth over the time before the first snapshot, as multiples of the state."""
    size, idle = facts["state_bytes"], facts["memory idle"]
    grown = {}
    for when in ("steady", "peak"):
        found = facts[f"memory {when}"]
        grown[when] = {
            "segments": round(found["segments"] / size, 2),
            "private": round((found["private"] - idle["private"]) / size, 2),
        }
    stated = {name: round(value / size, 2) for name, value in stated_bytes(size, copies).items()}
    return {"stated x state": stated, "grown x state": grown}


def show_run(name: str, summary: dict[str, Any]) -> None:
    """Prints a training run."""
    facts = summary["facts"]
    print(f"\n{name}: {facts['state_bytes'] / GB:.3f} GB, {facts['num_leaves']} leaves, {NUM_WORKERS} workers")
    for label, found in summary["seconds"].items():
        rate = summary["gb_per_s_per_rank"].get(label)
        _row(label, found, "" if rate is None else f"{rate:7.2f} GB/s per rank")
    for title in ("loop_ratios", "ratios"):
        for label, ratio in summary[title].items():
            print(f"  {label:<58} {ratio:9.2f} x")


def show_memory(name: str, facts: dict[str, Any], summary: dict[str, Any]) -> None:
    """Prints the processes, and what they grew by."""
    print(f"\n{name}: memory, MB            idle RSS   idle PSS   then RSS   then PSS")
    for before, after in zip(facts["memory idle"]["processes"], facts["memory steady"]["processes"], strict=False):
        cells = [before["rss"], before["pss"], after["rss"], after["pss"]]
        print(f"  {after['kind']:<26}" + "".join(f"{cell / 1e6:11.0f}" for cell in cells))
    print(f"  x state: stated {summary['stated x state']}")
    for when, grown in summary["grown x state"].items():
        print(f"  x state: {when} {grown}")


def show_recovery(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the phases, medians of all deaths."""
    print("\nDeath of a worker, 64 MB state: seconds until the step in which it died is done (medians)")
    print("  " + " " * 12 + "".join(f"{phase:>12}" for phase in PHASES) + f"{'all':>9}{'steps again':>13}{'n':>3}")
    for name, deaths in runs.items():
        cells = [summarize_recovery(deaths)[phase]["median"] for phase in (*PHASES, "total", "steps again")]
        *phases, total, again = cells
        row = "".join(f"{cell:12.2f}" for cell in phases)
        print(f"  {name:<12}{row}{total:9.2f}{again:13.0f}{len(deaths):3}")


def summarize_recovery(deaths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spread of every phase, of all, and of the steps done again."""
    names = {phase: [death["seconds"][phase] for death in deaths] for phase in PHASES}
    names |= {name: [death[name] for death in deaths] for name in ("total", "steps again")}
    return {name: spread(values, 2) for name, values in names.items()}


def _row(label: str, found: dict[str, Any], note: str) -> None:
    values = f"{found['median'] * MS:10.1f} ms  ({found['min'] * MS:.1f} .. {found['max'] * MS:.1f}, n={found['n']})"
    print(f"  {label:<58}{values}  {note}")
