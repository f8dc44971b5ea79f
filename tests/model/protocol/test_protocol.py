"""Every run of the memory tier's protocol within bounds, and proof that the exploration would see broken rules.

What is explored are the functions that stores and coordinator call. A fault is: a message that is late (for ever, or
twice), a transfer or a copy that stalls, breaks or is lost, a step that a rank skips or fails, bytes that rot, the
death of a store, of a whole node, of the coordinator, a store that lives and is silent, a rollback, a new worker group.
What else can happen happens in every order.

How far it goes by default: two ranks, two copies, two attempts and three steps with any one fault (15,000 states), two
steps with any two deaths or silent stores (24,000), kept handles of one or two steps (33,000), three ranks with one
step and any two deaths (17,000), three, two and three ranks and the reverse (15,000). With RJC_EXPLORE=1 further:
two ranks with any two faults and two steps (123,000 states) or three (694,000), a kept handle with any fault (66,000),
two kept handles with any fault (365,000), three ranks and three steps with any one fault (1,051,000), two steps with a
silent store and a dead coordinator (128,000), and two steps with any two faults, of which an hour goes through a part.
`test_long_runs` draws runs of six faults, three attempts and four steps.

Not in it: what happens between the parts of one decision of the coordinator, two pushes of a store to one peer at a
time, digests of replicas that ranks captured, and draining.
"""

from __future__ import annotations

import os

import pytest

from tests.model.protocol.draft import EVERYTHING, Bounds
from tests.model.protocol.explore import Broken, Explorer
from tests.model.protocol.variants import THREE, TWO, VARIANTS

# Work of seconds that a busy machine makes minutes of.
pytestmark = pytest.mark.timeout(900)

SHRINKS = ((("a", "b", "c"),), (("a", "c"),), (("a", "b", "c"),))
GROWS = ((("a", "b"),), (("a", "b", "c"),), (("a", "b"), ("b", "c")))

DEATHS = frozenset({"kill_store", "kill_domain", "kill_coordinator", "silence"})
DEFAULT = {
    "two ranks": Bounds(TWO, faults=1),
    "two ranks, two deaths": Bounds(TWO, steps=2, faults=2, ahead=1, kinds=DEATHS),
    "a kept handle": Bounds(TWO, faults=1, ahead=1, forced=frozenset({1}), kinds=frozenset({"delay", "skip"})),
    "two kept handles": Bounds(TWO, faults=1, ahead=1, forced=frozenset({1, 2}), keeps=False, kinds=frozenset()),
    "three ranks": Bounds(THREE, steps=1, faults=2, kinds=DEATHS - {"silence"}),
    "three, two, three ranks": Bounds(SHRINKS, steps=1, faults=2, kinds=frozenset({"kill_domain"})),
    "two, three, two ranks": Bounds(GROWS, steps=1, faults=2, kinds=frozenset({"kill_domain"})),
    "ranks skip at will": Bounds(
        TWO[:1], steps=2, faults=0, ahead=1, kinds=frozenset({"stall", "skip"}), skips_freely=True
    ),
}
FURTHER = {
    "two ranks, two faults": Bounds(TWO, steps=2, faults=2),
    "two ranks, two faults, three steps": Bounds(TWO, faults=2),
    "a kept handle": Bounds(TWO, faults=1, forced=frozenset({1}), kinds=EVERYTHING - {"rollback"}),
    "two kept handles": Bounds(TWO, faults=1, forced=frozenset({1, 2}), keeps=False),
    "three ranks": Bounds(THREE, faults=1, ahead=1),
    "three ranks, a silent store": Bounds(
        THREE, steps=2, faults=2, ahead=1, kinds=frozenset({"silence", "kill_coordinator"})
    ),
    "three ranks, two faults": Bounds(THREE, steps=2, faults=2, ahead=1),
    "three, two, three ranks": Bounds(SHRINKS, steps=2, faults=2, ahead=1, kinds=frozenset({"kill_domain"})),
}


@pytest.mark.parametrize("name", DEFAULT)
def test_every_run_keeps_what_was_complete_and_can_go_on(name):
    print(name, Explorer(DEFAULT[name]).run())


@pytest.mark.skipif("RJC_EXPLORE" not in os.environ, reason="takes minutes, the last ones hours: set RJC_EXPLORE=1")
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", FURTHER)
def test_every_longer_run_keeps_what_was_complete_and_can_go_on(name):
    print(name, Explorer(FURTHER[name]).run())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_caught(name, monkeypatch):
    variant = VARIANTS[name]
    variant.breaks(monkeypatch)
    with pytest.raises(Broken) as caught:
        Explorer(variant.bounds).run()
    print(caught.value)
    assert str(caught.value).startswith(variant.finds)


# Where something else is switched off as well, so that it shows.
ELSEWHERE = ["freed_when_a_newer_one_is_protected", "pushed_in_any_order", "every_loss_counts"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_right_rule_holds_where_the_broken_one_is_caught(name):
    Explorer(VARIANTS[name].bounds).run()
