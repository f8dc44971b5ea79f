"""A rank restores from other nodes while the stores there fail it."""

from __future__ import annotations

import pytest

from ray_jax_ckpt.testing import Fault

pytestmark = pytest.mark.timeout(240)


def start_elsewhere(crew, nodes) -> int:
    """A step is protected, and rank 1 starts again where nothing of it is."""
    crew.begin()
    step = crew.steps()
    crew.protect(step)
    crew.nodes[1] = next(node for node in nodes if node not in crew.nodes)
    return step


@pytest.mark.parametrize(
    ("action", "occurrence"),
    [("kill", 1), ("kill", 2), ("raise", 2), ("drop", 1), ("truncate", 1), ("corrupt", 2)],
)
def test_a_store_that_fails_while_it_serves_is_replaced_by_the_next_holder(crew, nodes, plan, action, occurrence):
    step = start_elsewhere(crew, nodes)
    assert crew.begin(fresh=[1]) == step
    armed = plan.arm(Fault("serve", action, step=step, occurrence=occurrence))
    found = crew.restore()
    assert armed.fired()
    assert [restored for restored, _ in found] == [step] * 2
    assert found[1][1] == "memory:peer"
    crew.protect(crew.steps())
    crew.settle()
