"""What cannot work is refused at the first call, in words: what was found where, and what to do instead."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ray_jax_ckpt as rjc
from ray_jax_ckpt import need, session
from ray_jax_ckpt.errors import ConfigError, MemoryLimitError, NoCheckpointError, StepError, UnsupportedLeafError

BAD_LEAVES = {
    "function": (lambda x: x, r"functions cannot be saved.*nnx\.split.*eqx\.partition"),
    "partial": (functools.partial(max, 1), "functions cannot be saved"),
    "class": (dict, "functions cannot be saved"),
    "iterator": (iter([1]), "iterators do not belong in the state: pass it as data="),
    "generator": ((x for x in [1]), "iterators do not belong in the state: pass it as data="),
    "objects": (np.array(["x", "y"], dtype=object), "its dtype is object; .*convert it to a numeric array"),
    "records": (np.zeros(2, [("a", "i4")]), "save each field"),
    "set": ({1}, r"save sorted\("),
    "own class": (types.SimpleNamespace(), "register its class as a pytree node"),
    "shape only": (jax.ShapeDtypeStruct((2,), jnp.float32), "pass the concrete state"),
}


@pytest.mark.parametrize(("leaf", "remedy"), BAD_LEAVES.values(), ids=BAD_LEAVES)
@pytest.mark.parametrize("step", [1, 10], ids=["not due", "due"])
def test_a_leaf_that_cannot_be_kept_is_refused_at_the_first_call_also_when_none_is_due(run, step, leaf, remedy):
    run.begin(every_n_steps=10)
    with pytest.raises(UnsupportedLeafError, match=rf"leaf \['opt'\]\[1\]\['x'\] of type .*{remedy}"):
        rjc.snapshot(step, {"opt": [1, {"x": leaf}]})
    # Nothing is left of it, and what can be kept is taken.
    handle = rjc.snapshot(10, {"opt": 1})
    assert rjc.restore(handle).state == {"opt": 1}


def test_a_leaf_that_turns_bad_later_is_refused_then(run):
    run.snapshot({"x": jnp.ones(2)})
    with pytest.raises(UnsupportedLeafError, match=r"\['x'\].*functions"):
        run.snapshot({"x": print})
    rjc.wait()


def test_a_tree_that_grows_beyond_what_it_may_take_costs_its_snapshots_and_the_last_one_stays(run):
    run.begin(max_bytes=8_000_000)
    run.snapshot({"x": jnp.ones(1000)})
    rjc.wait()
    grown = {"x": jnp.ones(1000), "more": jnp.ones(1_000_000)}
    text = r"step 2 skipped: rank 0 on node \w+ has not enough memory.*max_bytes allows 8 MB.*larger SnapshotConfig"
    with pytest.warns(RuntimeWarning, match=text):
        assert run.snapshot(grown) is None
    with pytest.raises(MemoryLimitError, match="max_bytes allows 8 MB"):
        run.snapshot(grown, force=True)
    assert rjc.latest() == 1
    run.snapshot({"x": jnp.ones(1000)})
    rjc.wait()
    assert rjc.latest() == 4


@functools.total_ordering
class Named:
    """A key that can be ordered, and is known by its address only."""

    def __lt__(self, other):
        return id(self) < id(other)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": {1: 0, "b": 0}}, "keys of one dictionary have to be of one type"),
        ({"a": {Named(): 0, Named(): 1}}, "known by its address only.*Use str or int keys"),
    ],
    ids=["mixed", "address"],
)
def test_keys_that_another_process_could_not_find_are_refused(run, state, why):
    with pytest.raises(UnsupportedLeafError, match=why):
        run.snapshot(state)


def test_a_node_that_is_too_small_is_said_at_the_first_call_with_the_numbers(run, monkeypatch):
    monkeypatch.setattr(need, "available_bytes", lambda: 8_000_000)
    monkeypatch.setattr(session.Session, "_held_bytes", lambda *_: 0)
    run.begin(every_n_steps=10)
    text = r"12 MB on this node \(1 worker\).*the node's free memory allows 8 MB.*fewer copies"
    for step in (1, 10):
        with pytest.raises(MemoryLimitError, match=text):
            rjc.snapshot(step, {"x": jnp.ones(1_000_000)})
    assert rjc.snapshot(1, {"x": jnp.ones(1000)}) is None
    rjc.snapshot(10, {"x": jnp.ones(1000)})
    rjc.wait()


@pytest.mark.parametrize("step", [-1, 1.0, "7", None, True, np.float32(2), jnp.ones(1), [3]], ids=repr)
def test_a_step_that_is_none_is_refused(run, step):
    with pytest.raises(StepError, match=r"must be an int, got .*Pass int\(step\)|must not be negative, got -1"):
        rjc.snapshot(step, {})


@pytest.mark.parametrize("step", [0, 2**40, 2**64, np.uint64(2**63)], ids=repr)
def test_steps_of_any_size_are_exact(run, step):
    assert rjc.restore(rjc.snapshot(step, {"x": 1})).step == int(step)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5", True], ids=repr)
def test_a_timeout_that_is_none_is_refused(run, timeout_s):
    handle = run.snapshot({"x": 1})
    for call in (
        rjc.wait,
        rjc.latest,
        lambda timeout_s: rjc.restore(handle, timeout_s=timeout_s),
        lambda timeout_s: rjc.snapshot(9, {}, timeout_s=timeout_s),
    ):
        with pytest.raises(ConfigError, match=r"timeout_s takes a positive number of seconds.*got"):
            call(timeout_s=timeout_s)


@pytest.mark.parametrize("metrics", [[1], 3, {1: 0.5}, "loss"], ids=repr)
def test_metrics_are_named_numbers(run, metrics):
    with pytest.raises(ConfigError, match=r"metrics takes a dictionary by name|Metrics have names that are text"):
        run.snapshot({}, metrics=metrics)


def test_a_relative_path_is_answered_with_where_it_leads_to(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoCheckpointError, match=rf"no checkpoint at {tmp_path}/checkpoints/5"):
        rjc.restore("checkpoints/5")
