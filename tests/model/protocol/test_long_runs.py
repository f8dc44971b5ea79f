"""Runs that are too long to go through all of them, drawn at random: more ranks, steps, attempts and faults at once."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.model.protocol import actions
from tests.model.protocol.completion import complete_run
from tests.model.protocol.draft import Bounds, Draft
from tests.model.protocol.explore import Explorer, picture
from tests.model.protocol.world import World

RUNS = int(os.environ.get("RJC_RUNS", "40"))
LAYOUTS = (
    (("a", "b", "c"), ("a", "b")),
    (("a", "b"), ("a", "c"), ("c", "b"), ("a", "b", "c")),
    (("a", "b", "c"), ("b", "c"), ("a", "b")),
)
BOUNDS = Bounds(LAYOUTS, steps=4, faults=6, forced=frozenset({2}), keeps=False)


def one_step(explorer: Explorer, world: World, data: st.DataObject) -> tuple[str, World] | None:
    """Something that can happen, chosen by the test's data, in one of the ways in which it can go."""
    possible = list(actions.enabled(BOUNDS, world))
    label, action = data.draw(st.sampled_from(possible))
    choices = tuple(data.draw(st.lists(st.integers(0, 7), max_size=6)))
    draft = Draft(BOUNDS, explorer.cells, world, tuple(int(choice == 7) for choice in choices))
    if action(draft) is False:
        return None
    return label, draft.world()


@pytest.mark.timeout(900)
@settings(
    max_examples=RUNS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.reuse, Phase.generate],  # Making an example smaller takes many times as long as finding it.
)
@given(st.data())
def test_long_runs_keep_what_was_complete_and_can_go_on(data):
    explorer = Explorer(BOUNDS)
    world, told = explorer.start(), []
    for _ in range(data.draw(st.integers(20, 150))):
        found = one_step(explorer, world, data)
        if found is None:
            continue
        label, after = found
        told.append(label)
        problem = next(explorer.invariants.broken(world, after, label), None)
        assert problem is None, "\n".join([str(problem), *told, picture(BOUNDS, after)])
        world = after
    way, problem = complete_run(BOUNDS, explorer.cells, world, set())
    assert not problem, "\n".join([problem, *told, *(f"> {step}" for step in way), picture(BOUNDS, world)])
