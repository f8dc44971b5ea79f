"""Which rank snapshotted which generation of which tree: ranks that differ are found and named as soon as they speak.

Nothing else would tell: the generations of ranks that count their steps differently, or hold different trees, never
become complete, keep their buffers, and end in waits that time out.

Values are immutable, transitions pure. Reports may come late, twice, in any order, or never.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_jax_ckpt.model.shards import Generation

MAX_REMEMBERED = 32
"""Generations and, of each rank, steps from one to the next, that are compared."""
MAX_LEAVES = 1000
"""Leaves of a rank's description of its tree: for messages, so that they stay small."""
MAX_NAMED = 5


@dataclass(frozen=True)
class Began:
    """A rank's report that it snapshots a generation.

    Attributes:
        rank: Who.
        generation: What.
        previous: The one that it snapshotted before in this attempt; None for its first.
        structure: Digest that all ranks must agree on.
        leaves: The first leaves of a structure that this rank has not had before, one line each.
    """

    rank: int
    generation: Generation
    previous: Generation | None
    structure: str
    leaves: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Attendance:
    """What the ranks of one attempt have reported.

    Attributes:
        world_size: Ranks of the group.
        structures: Of the generations that not all ranks have reported: structure by rank.
        reports: The last ones of each rank.
        leaves: Of each structure.
    """

    world_size: int
    structures: Mapping[Generation, Mapping[int, str]] = field(default_factory=dict)
    reports: Mapping[int, tuple[Began, ...]] = field(default_factory=dict)
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def describe(leaves: Sequence[Mapping[str, Any]], local: Collection[int]) -> tuple[str, ...]:
    """The first leaves of a tree as ranks compare them: what each has to itself may differ in shape."""
    return tuple(
        f"{leaf['path'] or '(the whole state)'} ({leaf['kind']}"
        + ("" if number in local else f" {leaf['dtype']}[{','.join(map(str, leaf['shape']))}]")
        + ")"
        for number, leaf in enumerate(leaves[:MAX_LEAVES])
    )


def began(attendance: Attendance, report: Began) -> tuple[Attendance, dict[Generation, str]]:
    """A rank snapshots a generation.

    Returns:
        Also the generations that can, by this report, never become complete, and why.
    """
    generation, rank = report.generation, report.rank
    structures = {**attendance.structures}
    structures[generation] = {**structures.get(generation, {}), rank: report.structure}
    reports = {**attendance.reports, rank: (*attendance.reports.get(rank, ()), report)[-MAX_REMEMBERED:]}
    leaves = dict([*attendance.leaves.items(), (report.structure, report.leaves)][-MAX_REMEMBERED:])
    after = replace(
        attendance, structures=structures, reports=reports, leaves=leaves if report.leaves else attendance.leaves
    )
    found = _passed_over(after, report)
    if generation not in attendance.structures:
        found |= _left_out_before(after, report)
    if len(set(structures[generation].values())) > 1:
        found[generation] = _different_trees(after, generation)
    open_ = {g: ranks for g, ranks in structures.items() if g not in found and len(ranks) < attendance.world_size}
    return replace(after, structures=dict(sorted(open_.items())[-MAX_REMEMBERED:])), found


def _skips(report: Began, generation: Generation) -> bool:
    return generation < report.generation and (report.previous is None or report.previous < generation)


def _passed_over(attendance: Attendance, report: Began) -> dict[Generation, str]:
    """What this rank has left out of what others took."""
    found = {}
    for generation, ranks in attendance.structures.items():
        if report.rank not in ranks and _skips(report, generation):
            found[generation] = _without([report], ranks)
    return found


def _left_out_before(attendance: Attendance, report: Began) -> dict[Generation, str]:
    """What is new to all, but others had left it out."""
    others = [one for rank, of_rank in attendance.reports.items() if rank != report.rank for one in of_rank]
    without = [one for one in others if _skips(one, report.generation)]
    if not without:
        return {}
    return {report.generation: _without(without, attendance.structures[report.generation])}


def _without(missing: list[Began], taken_by: Mapping[int, str]) -> str:
    named = [
        f"rank {one.rank} went {'' if one.previous is None else f'from step {one.previous.step} '}on to step "
        f"{one.generation.step} without it"
        for one in sorted(missing, key=lambda one: one.rank)
    ]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return (
        f"{', '.join(named[:MAX_NAMED])}{more}, ranks {_short(taken_by)} snapshotted it; all ranks have to "
        "snapshot the same steps: take the step from what restore() returned, on every rank"
    )


def _short(ranks: Mapping[int, str]) -> str:
    first = sorted(ranks)
    return str(first) if len(first) <= MAX_NAMED else f"{first[:MAX_NAMED]} and {len(first) - MAX_NAMED} more"


def _different_trees(attendance: Attendance, generation: Generation) -> str:
    by_structure: dict[str, dict[int, str]] = {}
    for rank, structure in sorted(attendance.structures[generation].items()):
        by_structure.setdefault(structure, {})[rank] = structure
    (first, of_first), (second, of_second) = list(by_structure.items())[:2]
    one, other = attendance.leaves.get(first, ()), attendance.leaves.get(second, ())
    common = set(one) & set(other)
    lines = [
        *[f"only ranks {_short(of_first)} have {leaf}" for leaf in one if leaf not in common],
        *[f"only ranks {_short(of_second)} have {leaf}" for leaf in other if leaf not in common],
    ]
    more = f"; and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    what = "; ".join(lines[:MAX_NAMED]) + more if lines else "the leaves are the same, their shardings are not"
    return (
        f"ranks snapshotted different trees, shapes or shardings: ranks {_short(of_first)} and ranks "
        f"{_short(of_second)} differ: {what}"
    )
