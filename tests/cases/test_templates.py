"""A template and a snapshot that do not fit each other: what is said, and what is allowed on request."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ray_jax_ckpt as rjc
from cases.compare import abstract, assert_same
from cases.conftest import BOTH_TIERS
from ray_jax_ckpt.errors import TreeMismatchError, UnsupportedLeafError

pytestmark = BOTH_TIERS

MESH = Mesh(np.array(jax.devices()[:4]), ("d",))
ROWS, EVERYWHERE = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())


def model(depth, width=4):
    return {f"l{number}": {"w": jnp.full((width, 2), number, jnp.float32)} for number in range(depth)}


def test_a_model_of_another_depth_or_width_is_refused_leaf_by_leaf(run):
    handle = run.snapshot(model(12))
    with pytest.raises(TreeMismatchError) as deeper:
        rjc.restore(handle, model(16))
    lines = str(deeper.value).splitlines()
    assert re.match("The snapshot of step .* does not fit the template", lines[0])
    assert lines[1:] == [
        f"['l{n}']['w']: the template wants float32[4,2], the snapshot has no such leaf" for n in (12, 13, 14, 15)
    ]
    with pytest.raises(TreeMismatchError) as shallower:
        rjc.restore(handle, model(8))
    assert str(shallower.value).count("the snapshot has float32[4,2], the template no such leaf (allowed with") == 4
    with pytest.raises(TreeMismatchError) as wider:
        rjc.restore(handle, model(12, width=8))
    lines = str(wider.value).splitlines()[1:]
    assert lines[0] == "['l0']['w']: the template wants float32[8,2], the snapshot has float32[4,2]"
    assert lines[-1] == "... and 3 more leaves that do not fit"
    assert len(lines) == 10
    # None of the attempts has cost the snapshot, or counts as a restore.
    assert_same(rjc.restore(handle, abstract(model(12))).state, model(12))


def test_a_part_is_restored_only_when_asked_for_and_never_invented(run):
    handle = run.snapshot(model(12))
    assert_same(rjc.restore(handle, abstract(model(8)), partial=True).state, model(8))
    for template in (model(16), model(8) | {"new": jnp.ones(2)}):
        with pytest.raises(TreeMismatchError, match="the snapshot has no such leaf"):
            rjc.restore(handle, template, partial=True)
    assert rjc.restore(handle, {}, partial=True).state == {}


def test_missing_extra_and_different_leaves_are_all_named_with_both_sides(run):
    handle = run.snapshot(
        {"same": 1, "gone": np.ones(3, "i2"), "kind": 5, "key": jax.random.key(0), "shape": jnp.ones(2)}
    )
    template = {"same": 1, "new": "text", "kind": 5.0, "key": jnp.ones(2, jnp.uint32), "shape": jnp.ones((2, 1))}
    with pytest.raises(TreeMismatchError) as caught:
        rjc.restore(handle, template, cast=True)
    for line in (
        "['gone']: the snapshot has int16[3], the template no such leaf",
        "['new']: the template wants a value of type str, the snapshot has no such leaf",
        "['kind']: the template wants a value of type float, the snapshot has a value of type int",
        "['key']: the template wants uint32[2], the snapshot has a threefry2x32 PRNG key array []",
        "['shape']: the template wants float32[2,1], the snapshot has float32[2]",
    ):
        assert line in str(caught.value)
    assert "['same']" not in str(caught.value)


def test_shardings_count_against_the_template_s_and_may_cover_a_part(run):
    state = {"a": {"w": jnp.arange(8.0), "k": jax.random.key(1)}, "b": np.arange(3), "n": 2}
    handle = run.snapshot(state)
    found = rjc.restore(handle, abstract(state), shardings=EVERYWHERE).state
    assert found["a"]["w"].sharding == EVERYWHERE
    assert found["a"]["k"].sharding == EVERYWHERE
    assert isinstance(found["b"], np.ndarray)
    template = jax.tree.map(lambda x: jax.device_put(x, EVERYWHERE) if isinstance(x, jax.Array) else x, state)
    part = {"a": {"w": ROWS, "k": None}, "b": None, "n": None}
    found = rjc.restore(handle, template, shardings=part).state
    assert (found["a"]["w"].sharding, found["a"]["k"].sharding) == (ROWS, EVERYWHERE)
    with pytest.raises(TreeMismatchError, match="shardings= is not a prefix of the template"):
        rjc.restore(handle, template, shardings={"c": ROWS})
    with pytest.raises(TreeMismatchError, match=r"\['a'\]\['w'\].*cannot be sharded as asked"):
        rjc.restore(
            handle, template, shardings={"a": {"w": NamedSharding(MESH, P(None, "d")), "k": None}, "b": None, "n": None}
        )


def test_a_template_may_be_numpy_jax_or_abstract_for_the_same_snapshot(run):
    state = {"w": jnp.arange(4, dtype=jnp.bfloat16), "n": np.arange(4)}
    handle = run.snapshot(state)
    as_numpy = rjc.restore(handle, {"w": np.zeros(4, jnp.bfloat16), "n": np.zeros(4, int)}).state
    assert type(as_numpy["w"]) is np.ndarray
    assert as_numpy["w"].dtype == jnp.bfloat16
    as_numpy["w"][:] = 0  # in memory of its own, that can be written
    with pytest.raises(TreeMismatchError, match=r"\['n'\].*int64.*jax_enable_x64"):
        rjc.restore(handle, {"w": state["w"], "n": jax.ShapeDtypeStruct((4,), np.int64)})
    bare = rjc.restore(handle).state
    assert bare["w"].tolist() == [0, 1, 2, 3]
    assert type(bare["n"]) is np.ndarray


def test_a_template_of_something_that_is_no_state_is_refused(run):
    handle = run.snapshot({"w": jnp.ones(2)})
    for odd in (object(), {1, 2}, np.array([None]), iter([1])):
        with pytest.raises(UnsupportedLeafError, match=r"\['w'\]"):
            rjc.restore(handle, {"w": odd})
