"""A picture of results: what snapshots and restores take, beside peers and references of the same run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN = {
    "capture": (
        "call",
        "complete",
        "protected",
        "orbax Snapshotter call",
        "orbax Snapshotter done",
        "orbax save_async disk call",
        "orbax save_async disk done",
        "orbax save_async tmpfs call",
        "orbax save_async tmpfs done",
    ),
    "restore": ("restore local", "restore peer", "memcpy cold", "socket, both ranks", "orbax Snapshotter load"),
    "leaves": ("call", "complete", "restore local", "orbax Snapshotter call", "orbax Snapshotter load"),
    "recovery": ("notice", "teardown", "start", "connect", "set up", "restore", "first step", "catching up", "total"),
}


def draw(results: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draws what there is of the themes, one panel per result. Says so if matplotlib is missing, and draws nothing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    panels = [(name, result) for name, result in results.items() if name.split("-")[0] in SHOWN]
    if not panels:
        return
    figure, axes = pyplot.subplots(len(panels), figsize=(9, 3.2 * len(panels)), squeeze=False)
    for (name, result), axis in zip(panels, axes[:, 0], strict=True):
        _panel(axis, name, result["runs"], SHOWN[name.split("-")[0]])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, name: str, runs: Mapping[str, dict[str, Any]], shown: Sequence[str]) -> None:
    labels = [label for label in shown if any(label in run["seconds"] for run in runs.values())]
    height = 0.8 / len(runs)
    for number, (run_name, run) in enumerate(runs.items()):
        found = [(i, run["seconds"].get(label)) for i, label in enumerate(labels)]
        places = [i + number * height for i, value in found if value]
        medians = [value["median"] for _, value in found if value]
        spreads = [[value["median"] - value["min"] for _, value in found if value]]
        spreads.append([value["max"] - value["median"] for _, value in found if value])
        axis.barh(places, medians, height, xerr=spreads, label=run_name, error_kw={"elinewidth": 0.8})
    axis.set_yticks([i + height * (len(runs) - 1) / 2 for i in range(len(labels))], labels)
    axis.invert_yaxis()
    if not name.startswith("recovery"):
        axis.set_xscale("log")
    axis.set_xlabel("seconds (median, least and most)")
    axis.set_title(name)
    axis.legend(fontsize="small")
