"""Measured values: collected by every rank, merged by the driver."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Samples:
    """One rank's measurements: lists of seconds (or other numbers) by name, and facts that are measured once."""

    def __init__(self) -> None:
        self.series: dict[str, list[float]] = defaultdict(list)
        self.facts: dict[str, Any] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that the block takes."""
        start = time.perf_counter()
        yield
        self.series[name].append(time.perf_counter() - start)

    def save(self, path: Path) -> None:
        """Writes them for the driver."""
        path.write_text(json.dumps({"series": self.series, "facts": self.facts}))


def merged(paths: Sequence[Path]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Series of several ranks, each value that of the slowest rank, and the facts of the first one."""
    ranks = [json.loads(path.read_text()) for path in paths]
    series = {}
    for name in ranks[0]["series"]:
        by_rank = [rank["series"][name] for rank in ranks if name in rank["series"]]
        series[name] = [max(values) for values in zip(*by_rank, strict=False)]
    return series, ranks[0]["facts"]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any] | None:
    """Median, extremes and number of some values."""
    if not values:
        return None
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in numbers.items()} | {"n": len(values)}
