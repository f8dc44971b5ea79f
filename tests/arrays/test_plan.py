"""What a rank captures and where it goes, of arrays of one process."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from stored_state import ALONE

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.plan import Planner, Topology, make_plan
from ray_jax_ckpt.errors import TreeMismatchError, UnsupportedLeafError
from ray_jax_ckpt.model.index import ALIGNMENT


def plan_of(state, topology=ALONE):
    return make_plan(tree.flatten(state), topology)


def items(plan):
    return {(item.leaf, item.box): part.id for part in plan.layout.parts for item in part.items}


def test_each_unique_shard_is_stored_once(mesh):
    state = {
        "replicated": jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P())),
        "sharded": jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P("fsdp"))),
        "tiled": jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P("replica", "fsdp"))),
    }
    plan = plan_of(state)
    boxes = [[item.box for part in plan.layout.parts for item in part.items if item.leaf == i] for i in range(3)]
    assert boxes[0] == [((0, 4), (0, 6))]
    assert sorted(boxes[1]) == [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    assert len(set(boxes[2])) == len(boxes[2]) == 4
    assert sum(part.num_bytes for part in plan.layout.parts) < 4 * 4 * 24 + 7 * ALIGNMENT


def test_a_process_with_its_own_state_has_it_in_its_host_part(mesh):
    sharded = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("fsdp")))
    state = {"array": sharded, "key": jax.random.key(0), "numpy": np.ones(3), "value": 3}
    plan = plan_of(state, Topology(1, ("a", "b"), 2))
    # Whatever one process of two can see whole is its own: no shard of a global array.
    assert plan.layout.local == {0, 1, 2, 3}
    assert set(items(plan).values()) == {"h1"}
    assert plan.values == (3,)
    assert {part.id: part.targets for part in plan.layout.parts} == {"h1": (0,)}


def test_what_is_stored_per_rank_is_announced(mesh):
    state = {"w": jnp.ones(256), "n": np.ones(128)}
    assert plan_of(state).stored == {0: (1024 + 1024, 0)}
    # Of the ranks that can share its node, peers' pushes included.
    assert plan_of(state, Topology(0, ("a", "b"), 2)).stored == {0: (2048, 2048)}
    assert plan_of(state, Topology(0, ("a", "a"), 2)).stored == {0: (2048, 0), 1: (2048, 0)}


def test_items_are_aligned_and_apart():
    plan = plan_of([jnp.ones(n, jnp.uint8) for n in (1, 63, 64, 65, 0, 3)])
    places = sorted((part.offset + item.offset, item.num_bytes) for part in plan.layout.parts for item in part.items)
    assert all(start % ALIGNMENT == 0 for start, _ in places)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places))
    assert places[-1][0] + places[-1][1] <= plan.layout.num_bytes


def test_a_state_without_arrays_needs_no_buffer():
    for state in ({}, {"a": 1, "b": None, "c": "text"}):
        assert plan_of(state).layout.num_bytes == 0


def test_the_same_structure_reuses_the_plan():
    planner = Planner(ALONE)
    first = planner.plan(tree.flatten({"w": jnp.ones(3), "n": np.ones(2), "step": 1, "name": "a", "x": None}))
    again = planner.plan(tree.flatten({"w": jnp.zeros(3), "n": np.zeros(2), "step": 2, "name": "other", "x": None}))
    assert again is first


STATE = {"w": jnp.ones(4), "n": np.ones(4, np.float32), "step": 1, "at": np.datetime64("2020-01-01")}


@pytest.mark.parametrize(
    "change",
    [
        {"w": jnp.ones(5)},
        {"w": jnp.ones(4, jnp.bfloat16)},
        {"w": tree.with_weak_type(jnp.ones(4), True)},
        {"w": jax.device_put(jnp.ones(4), jax.devices()[1])},
        {"w": np.ones(4, np.float32)},
        {"n": np.ones(5, np.float32)},
        {"n": np.ones(4, np.int32)},
        {"n": np.ones(4, ">f4")},
        {"step": 1.0},
        {"step": True},
        {"step": np.int64(1)},
        {"at": np.datetime64("2020-01-01T00:00:00")},
        {"more": 1},
        {"step": None},
        {"step": (1,)},
    ],
    ids=str,
)
def test_a_changed_tree_gets_a_new_plan(change):
    planner = Planner(ALONE)
    before, after = planner.plan(tree.flatten(STATE)), planner.plan(tree.flatten(STATE | change))
    assert after is not before
    assert after.layout.leaves == plan_of(STATE | change).layout.leaves != before.layout.leaves or "w" in change


def test_numpy_dtypes_that_look_alike_get_plans_of_their_own():
    # numpy calls both of them "V1".
    e4m3, e5m2 = (np.ones(4, getattr(jnp, name)) for name in ("float8_e4m3fn", "float8_e5m2"))
    planner = Planner(ALONE)
    assert [planner.plan(tree.flatten(x)).layout.leaves[0]["dtype"] for x in (e4m3, e5m2)] == [
        "float8_e4m3fn",
        "float8_e5m2",
    ]


@pytest.mark.parametrize("odd", [np.ma.masked_array(np.ones(4, np.float32), [0, 1, 0, 0]), np.ones(4, object), print])
def test_an_unsupported_leaf_is_refused_also_in_place_of_a_supported_one(odd):
    planner = Planner(ALONE)
    planner.plan(tree.flatten(STATE))
    with pytest.raises(UnsupportedLeafError, match=r"\['n'\]"):
        planner.plan(tree.flatten(STATE | {"n": odd}))
    assert planner.plan(tree.flatten(STATE)).layout.leaves[1]["path"] == "['n']"


def test_a_tracer_is_refused_in_words():
    planner = Planner(ALONE)

    @jax.jit
    def step(x):
        planner.plan(tree.flatten({"w": x}))
        return x

    with pytest.raises(UnsupportedLeafError, match=r"\['w'\].*tracer.*outside of jit"):
        step(jnp.ones(3))


def test_leaves_with_one_path_are_refused():
    class Twins:
        pass

    jax.tree_util.register_pytree_with_keys(
        Twins,
        lambda _: (((jax.tree_util.GetAttrKey("x"), 1), (jax.tree_util.GetAttrKey("x"), 2)), None),
        lambda *_: Twins(),
    )
    with pytest.raises(TreeMismatchError, match=r"\.x"):
        plan_of(Twins())


def test_structures_agree_between_ranks_exactly_when_their_trees_do():
    def structure(rank, state, domains=("a", "b"), copies=2):
        return plan_of(state, Topology(rank, domains, copies)).layout.structure

    state = {"n": np.ones(3), "step": 1}
    assert structure(0, state) == structure(1, state)
    # Per-process arrays and values may differ in shape, not in place.
    assert structure(0, state) == structure(1, {"n": np.ones(7), "step": 5})
    assert structure(0, state) != structure(1, {"n": np.ones(3)})
    assert structure(0, state) != structure(1, {"n": np.ones(3), "step": np.ones(1)})
    assert structure(0, state) != structure(1, state, domains=("a", "a"))
