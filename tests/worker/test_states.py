"""A state of every kind of leaf: what comes back is what was there at the call, whatever happened to it next."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ray_jax_ckpt as rjc
from ray_jax_ckpt.arrays.tree import with_weak_type
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
from ray_jax_ckpt.errors import RestoreError, TreeMismatchError
from ray_jax_ckpt.testing import assert_identical

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))


class Moments(NamedTuple):
    mean: Any
    square: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


def sharded(x: Any, *spec: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def state_of(step: int) -> dict[str, Any]:
    """Each step's differs in every leaf that can."""
    grid = jnp.arange(64.0).reshape(8, 8) + step
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {
        "layers": [Layer(sharded(grid, "fsdp"), sharded(grid[0], None)), Layer(sharded(grid * 2, None, "fsdp"), None)],
        "moments": Moments(sharded(grid, "replica", "fsdp"), sharded(grid * 3, ("replica", "fsdp"))),
        "half": sharded(jnp.full(6, step, jnp.bfloat16)),
        "tiny": jnp.full(5, step, jnp.float8_e4m3fn),
        "mask": sharded(jnp.arange(8) % 3 == step % 3, "fsdp"),
        "special": jnp.array([jnp.nan, -0.0, jnp.inf, step]),
        "scale": with_weak_type(jnp.array(0.5 * step), True),
        "key": jax.random.key(step),
        "keys": sharded(jax.random.split(jax.random.key(step, impl="rbg"), 4), "fsdp"),
        "offloaded": jax.device_put(grid, host),
        "empty": sharded(jnp.zeros((4, 0)), "fsdp"),
        "numpy": np.asfortranarray(np.arange(12.0).reshape(3, 4) + step),
        "scalar": np.float64(step),
        "plain": {"step": step, "rate": 0.1, "name": f"run {step}", "on": True, "none": None, "void": (), "dict": {}},
    }


def ruin(state: dict[str, Any]) -> None:
    """What a training may do right after the call: donate, delete, and write over what is on the host."""
    state["numpy"][:] = -1
    moments = state["moments"]
    state["layers"][0].weight = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(state["layers"][0].weight)
    jax.jit(lambda x, y: (y * 0, x * 0), donate_argnums=(0, 1))(*moments)
    for leaf in (state["half"], state["special"], state["key"], state["keys"], state["offloaded"], state["tiny"]):
        leaf.delete()
    state["plain"]["step"] = -1


def test_every_kind_of_leaf_is_what_it_was_at_the_call(attempts):
    attempts.begin()
    state = state_of(3)
    handle = rjc.snapshot(3, state)
    ruin(state)
    rjc.wait()
    template = state_of(0)
    assert_identical(rjc.restore(handle, template).state, state_of(3))
    assert_identical(template, state_of(0))  # what was given as a template is left as it is
    session = attempts.begin()
    again = SnapshotCheckpoint(session.decision.located.generation)
    restored = rjc.restore(again, state_of(0)).state
    assert_identical(restored, state_of(3))
    ruin(restored)  # it is the training's own: the copy in the store stays
    assert_identical(rjc.restore(again, state_of(0)).state, state_of(3))


def test_numpy_leaves_that_change_in_place_are_each_time_what_they_were(attempts):
    attempts.begin(every_n_steps=1)
    state = {"n": np.zeros(2**20)}
    for step in range(1, 6):
        state["n"] += 1
        handle = rjc.snapshot(step, state)
        state["n"] += 0.5
        assert_identical(rjc.restore(handle, {"n": np.zeros(2**20)}).state, {"n": np.full(2**20, 1.5 * step - 0.5)})


def test_a_tree_that_changes_at_step_50_is_followed_and_the_old_template_is_refused_by_path(attempts):
    attempts.begin(every_n_steps=10)

    def at(step):
        grown = {"ema": sharded(jnp.full((8, 8), step), "fsdp"), "w": sharded(jnp.full((16, 8), step), "fsdp")}
        return grown if step >= 50 else {"w": sharded(jnp.full((8, 8), step), "fsdp")}

    handle = None
    for step in range(30, 71):
        handle = rjc.snapshot(step, at(step)) or handle
        if step in (40, 50):
            rjc.wait()
            session = attempts.begin(every_n_steps=10)
            handle = SnapshotCheckpoint(session.decision.located.generation)
            assert_identical(rjc.restore(handle, at(step)).state, at(step))
    rjc.wait()
    assert_identical(rjc.restore(handle, at(70)).state, at(70))
    with pytest.raises(TreeMismatchError, match="ema"):
        rjc.restore(handle, at(40))


def test_a_restore_without_a_coordinator_is_an_error_of_the_restore(attempts):
    attempts.begin()
    rjc.snapshot(3, {"x": jnp.arange(3)})
    rjc.wait()
    session = attempts.begin(timeout_s=5)
    ray.kill(attempts.coordinator)
    with pytest.raises(RestoreError, match=r"The restore failed: .* cannot be reached"):
        rjc.restore(SnapshotCheckpoint(session.decision.located.generation), {"x": jnp.zeros(3, int)})
