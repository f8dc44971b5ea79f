"""Metrics as books and manifests keep them: as JSON, exactly, and what in them says how good a checkpoint is."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

NONFINITE = "rjc_nonfinite"
"""Where `to_metrics` keeps a score that is no finite number, by its name."""
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_QUOTE = "'"
_SEPARATORS = "./"


def encode(value: Any) -> Any:
    """What stands for a metric in JSON, which has no NaN and no infinity: they become text.

    Text that could be taken for one of them gets a quote in front.

    Args:
        value: Of numbers, text, bool, None, lists and mappings.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return _QUOTE + value if value.lstrip(_QUOTE) in _NONFINITE else value
    if isinstance(value, Mapping):
        return {name: encode(one) for name, one in value.items()}
    return [encode(one) for one in value] if isinstance(value, list | tuple) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, str) and value.lstrip(_QUOTE) in _NONFINITE:
        return value[1:] if value.startswith(_QUOTE) else _NONFINITE[value]
    if isinstance(value, Mapping):
        return {name: decode(one) for name, one in value.items()}
    return [decode(one) for one in value] if isinstance(value, list | tuple) else value


def locate(metrics: Any, name: str) -> tuple[Any, str] | None:
    """The mapping that holds a metric itself, and its name there; None: there is no such metric.

    Args:
        metrics: All.
        name: Of one, or a path of names with dots (or slashes, as Ray writes them).
    """
    holder, last = holder_for(metrics, name)
    return (holder, last) if last in holder else None


def holder_for(metrics: Any, name: str) -> tuple[Any, str]:
    """As `locate`, for a metric that may be missing: then the innermost mapping that its path leads to."""
    if name in metrics:
        return metrics, name
    for at, letter in enumerate(name):
        inner = metrics.get(name[:at]) if letter in _SEPARATORS else None
        if isinstance(inner, Mapping):
            return holder_for(inner, name[at + 1 :])
    return metrics, name


def find(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric by its name or path; None: there is none."""
    place = locate(metrics, name)
    return None if place is None else place[0][place[1]]


def score_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric as a score; None if it is missing, no number or not finite: such a one is worse than any number."""
    found = find(metrics, name)
    if not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def put_back(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What `ray_jax_ckpt.to_metrics` was given, of what it returned."""
    moved = metrics.get(NONFINITE)
    if not isinstance(moved, Mapping):
        return dict(metrics)
    whole = copy.deepcopy({name: value for name, value in metrics.items() if name != NONFINITE})
    for score, value in moved.items():
        holder, name = holder_for(whole, score)
        holder[name] = decode(value)
    return whole
