"""Results as markdown: one table per run, and beside an earlier result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, dict[str, Any]]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Results by name, of one file or of all in a folder. Other JSON files are passed over."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = [json.loads(file.read_text()) for file in files]
    return {result["name"]: result for result in found if isinstance(result, dict) and {"name", "runs"} <= set(result)}


def page(results: Results, earlier: Results) -> str:
    """All results."""
    return "\n\n".join(markdown(result, earlier.get(name)) for name, result in results.items()) + "\n"


def markdown(result: dict[str, Any], earlier: dict[str, Any] | None = None) -> str:
    """One result: where it was measured, and a table per run."""
    lines = [f"## {result['name']}", "", _where(result)]
    if earlier is not None:
        lines.append(f"Earlier: {_where(earlier)}")
    for name, run in result["runs"].items():
        before = dict(_rows(earlier["runs"].get(name, {}))) if earlier is not None else None
        lines += ["", f"### {result['name']}, {name}", "", *_table(run, before)]
    return "\n".join(lines)


def _where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    load = f"load {machine['load_average'][0]:.1f} before, {result['load_average_after'][0]:.1f} after"
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in ("ray", "jax", "orbax-checkpoint"))
    changed = " (changed since)" if machine["package_changed"] else ""
    return (
        f"{machine['time']}, commit {machine['commit']}{changed}, {machine['num_cpus']} cores ({machine['cpu']}), "
        f"{machine['memory_gb']} GB, {versions}; {load}."
    )


def _table(run: dict[str, Any], before: Mapping[str, dict[str, Any]] | None) -> Iterator[str]:
    compared = before is not None
    yield "| | median | least | most | n |" + (" earlier | now / earlier |" if compared else "")
    yield "|---|---|---|---|---|" + ("---|---|" if compared else "")
    for name, found in _rows(run):
        cells = [_number(found[key]) for key in ("median", "min", "max")] + [str(found.get("n", 1))]
        if compared:
            old = before.get(name)
            ratio = found["median"] / old["median"] if old and old["median"] else None
            cells += ["", ""] if ratio is None or old is None else [_number(old["median"]), f"{ratio:.2f}"]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _rows(run: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in run.get("seconds", {}).items():
        if found is not None:
            unit, scale = ("", 1.0) if name == "steps again" else (", ms", 1e3)
            scaled = {key: found[key] * scale for key in ("median", "min", "max")}
            yield f"{name}{unit}", scaled | {"n": found["n"]}
    for title, label in (("gb_per_s_per_rank", "{}, GB/s per rank"), ("loop_ratios", "{} / none"), ("ratios", "{}")):
        for name, value in run.get(title, {}).items():
            yield label.format(name), _single(value)
    for when, amounts in run.get("memory", {}).items():
        for name, value in amounts.items():
            yield f"memory, x state: {when} {name}", _single(value)


def _single(value: float) -> dict[str, Any]:
    return {"median": value, "min": value, "max": value}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
