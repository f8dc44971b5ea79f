"""What cannot be snapshotted costs that snapshot and nothing else."""

from __future__ import annotations

import pytest
import ray

pytestmark = pytest.mark.timeout(240)


def test_a_tree_that_changes_on_one_rank_is_refused_by_name_and_the_last_common_one_kept(crew):
    crew.begin()
    safe, step = crew.steps(), crew.steps()
    crew.protect(safe)
    ray.get(crew.snapshot(step, extra=(1,)))
    problem = [crew.problem(rank) for rank in crew.ranks]
    assert all("ranks snapshotted different trees" in text for text in problem), problem
    assert crew.latest() == safe
    assert crew.begin() == safe
    assert {step for step, _ in crew.restore()} == {safe}
    crew.protect(crew.steps())
    crew.settle()
