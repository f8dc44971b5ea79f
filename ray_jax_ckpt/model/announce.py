"""How all ranks come to snapshot one step that no cadence names, without a call that waits at every step.

Ranks run through the same positions, each at its own time. The coordinator *calls*; each rank *pledges* not to pass a
ceiling a little ahead of it until the call is over; when all have pledged, the highest ceiling is *named*: nobody has
passed it, and each takes the first snapshot at or after it. If somebody does not answer, nothing is named and the
pledges end. A rank waits only if it reaches its ceiling before the answer.

Values are immutable, transitions pure. Messages may be late, repeated, or never come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

Position = tuple[int, int]
"""(restores within the attempt, step): grows along each rank's calls of `snapshot`, also when a restore goes back."""

LOOKAHEAD_S = 0.5
"""How long, by a rank's recent pace, it can go on before it reaches its ceiling. Calls take milliseconds."""

MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class Named:
    """An announced snapshot: all ranks take it at the first position at or after `position`.

    Attributes:
        ballot: Of the call; grows from call to call.
        position: The ceiling that was the highest.
        leaving: Ranks whose nodes are drained: from this snapshot on they get no copies.
    """

    ballot: int
    position: Position
    leaving: frozenset[int] = frozenset()


class Verdict(StrEnum):
    """What a rank does at a position: PASS, take the announced snapshot (DUE), or wait for the call's end (HOLD)."""

    PASS = "pass"
    DUE = "due"
    HOLD = "hold"


@dataclass(frozen=True)
class Pledge:
    """A rank's side.

    Attributes:
        newest: The last position that it has gone through.
        ballot: The newest call that it has answered.
        ceiling: Where it waits for that call to end; None when it has.
        due: Announced and not reached yet.
        leaving: As of the newest announcement that it has reached.
        alone: Whether it has gone on beyond a ceiling because no end came in time. What it has passed since is kept, so
            that a step that was named all the same can be called off.
    """

    newest: Position = (0, -1)
    ballot: int = 0
    ceiling: Position | None = None
    due: tuple[Named, ...] = ()
    leaving: frozenset[int] = frozenset()
    alone: bool = False
    passed: tuple[Position, ...] = field(default=(), repr=False)


def margin(seconds_per_step: float | None) -> int:
    """Steps that a rank does in `LOOKAHEAD_S`, at least one: slow steps must not put the snapshot off."""
    if seconds_per_step is None or seconds_per_step >= LOOKAHEAD_S:
        return 1
    return min(MAX_REMEMBERED // 2, math.ceil(LOOKAHEAD_S / max(seconds_per_step, 1e-6)))


def called(pledge: Pledge, ballot: int, ahead: int) -> Pledge:
    """A call has come. Its repetition, or an older one, changes nothing.

    Args:
        pledge: Before.
        ballot: The call's.
        ahead: How many steps ahead the rank puts its ceiling.
    """
    if ballot <= pledge.ballot:
        return pledge
    restores, step = pledge.newest
    return replace(pledge, ballot=ballot, ceiling=(restores, step + ahead), alone=False, passed=())


def over(pledge: Pledge, ballot: int, named: Named | None) -> tuple[Pledge, Position | None]:
    """A call has ended.

    Returns:
        Also the position at which the others take the snapshot and this rank has not, if it went on alone.
    """
    if ballot != pledge.ballot or (pledge.ceiling is None and not pledge.alone):
        return pledge, None
    missed = next((p for p in pledge.passed if named is not None and p >= named.position), None)
    pledge = replace(pledge, ceiling=None, alone=False, passed=())
    if named is None:
        return pledge, None
    if missed is not None:
        # The others place their copies anew since then; snapshots on which ranks disagree about that are of no use.
        return replace(pledge, leaving=named.leaving), missed
    return replace(pledge, due=(*pledge.due, named)), None


def arrive(pledge: Pledge, position: Position) -> tuple[Pledge, Verdict]:
    """A rank is about to go through a position. HOLD: it asks again when the call is over, or goes on alone."""
    if pledge.ceiling is not None and position >= pledge.ceiling:
        return pledge, Verdict.HOLD
    reached = [named for named in pledge.due if position >= named.position]
    if pledge.alone and (not pledge.passed or pledge.passed[-1] != position):
        pledge = replace(pledge, passed=(*pledge.passed, position)[:MAX_REMEMBERED])
    if not reached:
        return replace(pledge, newest=position), Verdict.PASS
    rest = tuple(named for named in pledge.due if position < named.position)
    leaving = max(reached, key=lambda named: named.ballot).leaving
    return replace(pledge, newest=position, due=rest, leaving=leaving), Verdict.DUE


def go_alone(pledge: Pledge) -> Pledge:
    """No end of the call has come in time: the rank goes on."""
    return pledge if pledge.ceiling is None else replace(pledge, ceiling=None, alone=True, passed=())


@dataclass(frozen=True)
class Call:
    """The coordinator's side of one call.

    Attributes:
        ballot: Its number.
        ranks: Who has to pledge.
        leaving: See `Named`.
        ceilings: The pledges so far.
    """

    ballot: int
    ranks: frozenset[int]
    leaving: frozenset[int] = frozenset()
    ceilings: Mapping[int, Position] = field(default_factory=dict)

    def outcome(self) -> Named | None:
        """What is named when everybody has pledged, else None."""
        if not self.ranks or self.ranks - self.ceilings.keys():
            return None
        return Named(self.ballot, max(self.ceilings[rank] for rank in self.ranks), self.leaving)

    def silent(self) -> list[int]:
        """Ranks that have not pledged."""
        return sorted(self.ranks - self.ceilings.keys())


def pledged(call: Call, ballot: int, rank: int, ceiling: Position) -> Call:
    """A rank's answer. One to another call changes nothing, and a repeated one neither."""
    if ballot != call.ballot or rank in call.ceilings:
        return call
    return replace(call, ceilings={**call.ceilings, rank: ceiling})


def without(call: Call, gone: Iterable[int]) -> Call:
    """Ranks that are gone are not waited for."""
    return replace(call, ranks=call.ranks - frozenset(gone))
