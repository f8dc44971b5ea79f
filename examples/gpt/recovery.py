"""How each recovery went, phase by phase, from the time stamps of ranks, controller and the kill."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from gpt.faults import Death

PHASES = ("notice", "teardown", "start", "connect", "set up", "restore", "first step", "catching up")
"""Each lasts from the end of the one before, the first from the kill. notice: the controller knows; teardown: the old
workers are gone; start: new worker processes are up; connect: jax.distributed is up; set up: the train function asks
for its state; restore: all ranks have it; first step: it is done; catching up: the step it died in is done."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """One failure and what came after. Seconds are None where a time stamp is missing."""

    death: Death
    step: int | None
    sources: dict[int, str]
    seconds: dict[str, float | None]
    total_s: float | None

    @property
    def num_steps_lost(self) -> int:
        """Finished steps that had to be done again."""
        return self.death.step - (self.step or 0)

    @property
    def source(self) -> str:
        """Where the state came from: one name if all ranks agree, else by rank."""
        names = set(self.sources.values())
        if len(names) <= 1:
            return names.pop() if names else "nothing: began anew"
        return ", ".join(f"rank {rank} {source}" for rank, source in sorted(self.sources.items()))


def recoveries(deaths: list[Death], progress: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[Recovery]:
    """One `Recovery` per death. `progress` are the ranks' records, `events` the package's."""
    ends = [death.time for death in deaths[1:]] + [float("inf")]
    return [
        _recovery(death, _between(progress, death.time, end), _between(events, death.time, end))
        for death, end in zip(deaths, ends, strict=True)
    ]


def _recovery(death: Death, progress: list[dict[str, Any]], events: list[dict[str, Any]]) -> Recovery:
    # Survivors may finish a step after the death; what belongs to the new workers comes after their entry.
    entered = _first(progress, "entered")
    new = [record for record in progress if entered is not None and record["time"] >= entered]
    restored = [record for record in new if record["event"] == "restored"]
    steps = [record for record in new if record["event"] == "step"]
    first = min((record["step"] for record in steps), default=None)
    stamps = [
        death.time,
        _first(events, "worker_group_failed"),
        _first(events, "worker_group_shutdown"),
        _first(events, "workers_ready"),
        _first(events, "backend_ready") or entered,
        _first(new, "restoring"),
        max((record["time"] for record in restored), default=None),
        _passed(steps, first),
        _passed(steps, death.step + 1),
    ]
    spans = zip(PHASES, itertools.pairwise(stamps), strict=True)
    return Recovery(
        death,
        step=max((record["step"] for record in restored), default=None),
        sources={record["rank"]: record["source"] for record in restored},
        seconds={phase: _minus(end, start) for phase, (start, end) in spans},
        total_s=_minus(stamps[-1], stamps[0]),
    )


def describe(recovery: Recovery) -> str:
    """The status lines of one recovery."""
    phases = "  ".join(f"{phase} {_seconds(recovery.seconds[phase])}" for phase in PHASES)
    return (
        f"recovered from the death of {recovery.death}\n"
        f"    restored step {recovery.step or 0} from {recovery.source}; "
        f"died in step {recovery.death.step + 1}: {recovery.num_steps_lost} finished steps lost\n"
        f"    seconds: {phases}  = {_seconds(recovery.total_s)} until step {recovery.death.step + 1} was done"
    )


def _between(records: Iterable[dict[str, Any]], start: float, end: float) -> list[dict[str, Any]]:
    return [record for record in records if start < record["time"] < end]


def _first(records: list[dict[str, Any]], event: str) -> float | None:
    return next((record["time"] for record in records if record["event"] == event), None)


def _passed(steps: list[dict[str, Any]], step: int | None) -> float | None:
    """When the last rank was done with `step`."""
    times: dict[int, float] = {}
    for record in steps:
        if record["step"] == step:
            times.setdefault(record["rank"], record["time"])
    return max(times.values(), default=None)


def _minus(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}"
