"""The result file's head, and what is computed from measured values."""

from __future__ import annotations

import importlib.metadata
import json
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
GB = 1e9
RATED = ("restore local", "restore peer", "first restore", "memcpy", "xxh3", "socket", "orbax Snapshotter load")


def show(results: dict[str, Any], output: Path | None) -> None:
    """Prints results, and writes them to a file if one is named."""
    text = json.dumps(results, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")


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
        ("call", "orbax save_async disk call"),
        ("call", "orbax save_async tmpfs call"),
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
        grown[f"{when} segments"] = round(found["segments"] / size, 2)
        grown[f"{when} private"] = round((found["private"] - idle["private"]) / size, 2)
    stated = {name: round(value / size, 2) for name, value in stated_bytes(size, copies).items()}
    return {"stated x state": stated, "grown x state": grown}


def summarize_recovery(deaths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spread of every phase, of all, and of the steps done again."""
    names = {phase: [death["seconds"][phase] for death in deaths] for phase in PHASES}
    names |= {name: [death[name] for death in deaths] for name in ("total", "steps again")}
    return {name: spread(values, 2) for name, values in names.items()}
