"""Copies made on the devices: nothing is changed by them, whatever the caller does next, and nothing stays behind."""

from __future__ import annotations

import functools
import gc
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from stored_state import ALONE

from ray_jax_ckpt.arrays import plan as plan_module
from ray_jax_ckpt.arrays import staging, tree
from ray_jax_ckpt.arrays.plan import Planner, capture
from ray_jax_ckpt.digest import copy_and_digest

COPY = functools.partial(copy_and_digest, verify=True)


class Snapshots:
    """Takes states as a worker does, with a planner that has staged once before."""

    def __init__(self, state, *, on_device=False):
        self.planner = Planner(ALONE, on_device=on_device)
        self.plan = self.planner.plan(tree.flatten(state))
        self.plan.staging.compile()
        assert self.plan.staging.is_ready

    def take(self, state):
        flat = tree.flatten(state)
        return capture(self.planner.plan(flat), flat)

    def stored(self, captured):
        """The bytes of every item by leaf and box, as they are in the store's buffer."""
        plan = captured.plan
        buffer = np.full(plan.layout.num_bytes, 0xAA, np.uint8)
        digests = captured.write(buffer, COPY)
        found = {}
        for part in plan.layout.parts:
            for item, digest in zip(part.items, digests[part.id], strict=True):
                start = part.offset + item.offset
                content = buffer[start : start + item.num_bytes]
                assert digest == COPY(np.empty_like(content), content)
                found[item.leaf, item.box] = content.tobytes()
        return found


def wanted(state):
    """What must be stored: every distinct shard's bytes."""
    found = {}
    for number, leaf in enumerate(tree.flatten(state).leaves):
        plain = tree.key_data(leaf) if tree.is_key(leaf) else leaf
        for shard in plain.addressable_shards:
            box = tuple(part.indices(size)[:2] for part, size in zip(shard.index, plain.shape, strict=True))
            found[number, box] = np.asarray(shard.data).tobytes()
    return found


def small(count=40, value=0.0):
    return {f"l{i:02d}": jnp.full((3, i % 5 + 1), value + i, jnp.float32) for i in range(count)}


def every_bit_pattern(dtype):
    """All 8- and 16-bit patterns (signalling NaNs included), or odd ones of wider types."""
    bits = np.dtype(dtype).itemsize * 8
    if bits <= 16:
        return np.arange(2**bits, dtype=f"u{bits // 8}").view(dtype)
    return np.array([0, 1, 0x7F800001, 0x7FC0BEEF, 0xFF800001, 0x80000000, 0xFFFFFFFF], np.uint32).view(dtype)


FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def test_tiny_shards_of_every_dtype_are_stored_bit_for_bit(mesh, monkeypatch):
    monkeypatch.setattr(staging, "TINY_BYTES", 1 << 20)
    state = {np.dtype(dtype).name: jnp.asarray(every_bit_pattern(dtype)) for dtype in (*FLOATS, np.int8, np.uint32)}
    state |= {
        "bool": jnp.array([[True, False, True]]),
        "int4": jnp.arange(-8, 8).astype(jnp.int4),
        "complex": jnp.array([1 + 2j, complex(np.nan, -0.0)]),
        "scalar": jnp.float32(2.5),
        "weak": jnp.asarray(3),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(7, impl="rbg"),
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("replica", "fsdp"))),
        "more": small(),
    }
    snapshots = Snapshots(state)
    captured = snapshots.take(state)
    assert len(captured.arrays) < len(captured.places) - 40
    assert snapshots.stored(captured) == wanted(state)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_donating_step_right_after_does_not_reach_the_snapshot(mesh, on_device):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    big = jax.device_put(jnp.zeros((256, 4096)), NamedSharding(mesh, P("fsdp")))
    state = {"big": big, "small": small(), "replicated": jax.device_put(jnp.zeros(9), NamedSharding(mesh, P()))}
    state = step(state)
    snapshots = Snapshots(state, on_device=on_device)
    for _ in range(3):
        state = step(state)
        expected = wanted(jax.tree.map(jnp.copy, state))
        captured = snapshots.take(state)
        assert bool(captured.staged) == on_device
        for _ in range(2):
            state = step(state)
        assert snapshots.stored(captured) == expected
        assert not captured.staged


@pytest.mark.parametrize("on_device", [False, True])
def test_sources_may_be_deleted_at_once(on_device):
    state = {"small": small(), "big": jnp.arange(1.0 * (1 << 20))}
    snapshots = Snapshots(state, on_device=on_device)
    expected = wanted(state)
    captured = snapshots.take(state)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    assert snapshots.stored(captured) == expected


def test_leaves_in_host_memory_are_not_copied_to_devices(mesh):
    pinned = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    state = {"offloaded": jax.device_put(jnp.arange(1.0 * (1 << 16)), pinned), "small": small()}
    snapshots = Snapshots(state, on_device=True)
    expected = wanted(state)
    captured = snapshots.take(state)
    staged = {captured.arrays[i].sharding.memory_kind for i in captured.staged}
    kinds = {x.sharding.memory_kind for x in captured.arrays}
    assert staged == {"device"}
    assert kinds == {"device", "pinned_host"}
    state["offloaded"].delete()
    assert snapshots.stored(captured) == expected


def test_device_memory_is_free_when_the_snapshot_has_left():
    state = {"small": small(), "big": jnp.arange(1.0 * (1 << 18))}
    snapshots = Snapshots(state, on_device=True)

    def device_bytes():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")

    before = device_bytes()
    captured = snapshots.take(state)
    assert device_bytes() >= before + state["big"].nbytes
    snapshots.stored(captured)
    assert device_bytes() == before


def test_few_tiny_shards_are_left_as_they_are():
    state = small(staging.MIN_OPERANDS - 1)
    planner = Planner(ALONE)
    plan = planner.plan(tree.flatten(state))
    plan.staging.compile()
    assert not plan.staging.is_ready
    assert len(capture(plan, tree.flatten(state)).arrays) == len(state)


def test_a_changed_tree_is_staged_anew():
    snapshots = Snapshots(small(40))
    grown = small(50, value=5.0)
    captured = snapshots.take(grown)
    assert len(captured.arrays) == 50
    captured.plan.staging.compile()
    again = snapshots.take(grown)
    assert len(again.arrays) == 1
    assert snapshots.stored(again) == snapshots.stored(captured) == wanted(grown)


class Exhausted:
    def __call__(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")


def test_a_full_device_means_direct_copies_and_one_warning():
    state = {"small": small(), "big": jnp.arange(1.0 * (1 << 18))}
    snapshots = Snapshots(state, on_device=True)
    snapshots.plan.staging._programs[-1] = Exhausted()
    with pytest.warns(RuntimeWarning, match=r"no room for that copy.*staging=.host"):
        taken = [snapshots.take(state)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshots.plan.staging.compile()
        taken.append(snapshots.take(state))
    for captured in taken:
        assert not captured.staged
        assert snapshots.stored(captured) == wanted(state)


def test_a_full_device_that_is_noticed_late_fails_one_snapshot_and_not_the_next(monkeypatch):
    state = {"small": small(), "big": jnp.arange(1.0 * (1 << 18))}
    snapshots = Snapshots(state, on_device=True)
    captured = snapshots.take(state)
    warned = pytest.warns(RuntimeWarning, match="directly from now on")
    failed = pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED")
    with monkeypatch.context() as patch, warned, failed:
        patch.setattr(plan_module, "pin_bytes", Exhausted())
        snapshots.stored(captured)
    assert snapshots.stored(snapshots.take(state)) == wanted(state)


def test_what_cannot_be_compiled_is_copied_directly(monkeypatch):
    def broken(*_):
        raise ValueError("no such instruction")

    monkeypatch.setattr(staging, "_packed", broken)
    state = small()
    planner = Planner(ALONE)
    plan = planner.plan(tree.flatten(state))
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        plan.staging.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.staging.compile()
        captured = capture(plan, tree.flatten(state))
    buffer = np.empty(plan.layout.num_bytes, np.uint8)
    captured.write(buffer, COPY)
    assert bytes(buffer[: state["l00"].nbytes]) == np.asarray(state["l00"]).tobytes()


def test_where_warnings_are_errors_a_full_device_costs_no_snapshot(caplog):
    state = {"big": jnp.arange(1.0 * (1 << 18))}
    snapshots = Snapshots(state, on_device=True)
    snapshots.plan.staging._programs[-1] = Exhausted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = snapshots.take(state)
    assert "no room" in caplog.text
    assert snapshots.stored(captured) == wanted(state)
