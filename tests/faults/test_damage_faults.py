"""Copies that are damaged where they lie."""

from __future__ import annotations

import pytest

from faults.test_restores import start_elsewhere

pytestmark = pytest.mark.timeout(240)


def test_one_damaged_copy_is_passed_over_for_the_other(crew, nodes):
    step = start_elsewhere(crew, nodes)
    assert crew.live.damage(0, step=step)
    assert crew.begin(fresh=[1]) == step
    assert [restored for restored, _ in crew.restore()] == [step] * 2
    crew.protect(crew.steps())
    crew.settle()


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_when_every_copy_is_damaged_all_ranks_go_back_together(crew, how):
    crew.begin()
    safe, step = crew.steps(), crew.steps()
    crew.protect(safe)
    # Rank 1 is late: until it comes, the step before is kept.
    crew.snapshot(step, ranks=[0])
    crew.eventually_held(1, step)
    for rank in crew.ranks:
        crew.live.damage(rank, step=step, how=how)
    crew.stop_coordinator()
    crew.snapshot(step, ranks=[1])
    crew.eventually_held(0, step, from_rank=1)
    crew.start_coordinator()
    assert crew.begin() == safe
    assert [restored for restored, _ in crew.restore()] == [safe] * 2
    crew.protect(crew.steps())
    crew.settle()
