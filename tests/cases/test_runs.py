"""Whose snapshots a run finds, what it says of them, and how much memory they take."""

from __future__ import annotations

import asyncio
import types

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import eventually

import ray_jax_ckpt as rjc
from cases.conftest import BOTH_TIERS, OBJECT_STORE_BYTES
from ray_jax_ckpt.errors import PersistError, TreeMismatchError
from ray_jax_ckpt.memory import fleet


def seeded(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (64,)), "seed": seed}


def test_a_run_finds_its_own_snapshots_and_nobody_else_s(group_of):
    one = group_of(0)
    one.begin()
    one.snapshot(seeded(1))
    rjc.wait()
    # At the same time, of the same shapes, with another name or place.
    other = group_of(0)
    other.begin()
    assert other.checkpoint() is None
    assert rjc.latest() is None
    # After the first has ended well nothing of it is left.
    ray.get(one.coordinator.finish.remote(keep=False), timeout=30)
    eventually(lambda: not fleet.living_stores(one.run))
    again = group_of(0, run=one.run)
    again.begin()
    assert again.checkpoint() is None


def test_a_train_function_that_does_not_ask_for_what_could_be_restored_is_told_once(run, caplog):
    caplog.set_level("WARNING", "ray_jax_ckpt")
    run.snapshot(seeded(1))
    rjc.wait()
    assert not caplog.records
    run.begin()
    run.step = 3
    for _ in range(3):
        run.snapshot(seeded(2))
    (record,) = caplog.records
    assert "Step 1 of this run is in memory" in record.getMessage()
    assert "without having called restore()" in record.getMessage()
    assert "ray.train.get_checkpoint()" in record.getMessage()
    rjc.wait()
    # Who asks is told nothing, and gets the newest complete step of the newest attempt.
    caplog.clear()
    run.begin()
    assert rjc.restore(run.checkpoint()).state["seed"] == 2
    run.step = 10
    run.snapshot(seeded(2))
    rjc.wait()
    assert "called restore" not in caplog.text


def test_a_newer_attempt_counts_more_than_a_higher_step(run):
    run.step = 49
    run.snapshot(seeded(1))
    rjc.wait()
    run.begin()
    run.snapshot(seeded(2))
    rjc.wait()
    run.begin()
    restored = rjc.restore(run.checkpoint())
    assert (restored.step, restored.state["seed"]) == (1, 2)


def test_another_model_under_the_same_name_is_refused_before_its_first_step(run):
    run.snapshot({"encoder": jnp.ones((4, 4))})
    rjc.wait()
    run.begin()
    with pytest.raises(TreeMismatchError, match=r"\['decoder'\].*the snapshot has no such leaf"):
        rjc.restore(run.checkpoint(), {"decoder": jnp.ones((2, 2))})


@BOTH_TIERS
def test_donated_and_deleted_arrays_of_any_memory_are_kept_as_they_were(run):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("d",))
    where = {
        "device": SingleDeviceSharding(devices[0]),
        "pinned": SingleDeviceSharding(devices[0], memory_kind="pinned_host"),
        "sharded": NamedSharding(mesh, P("d")),
        "pinned and sharded": NamedSharding(mesh, P("d"), memory_kind="pinned_host"),
    }
    first = {name: jax.device_put(jnp.arange(2.0**16), sharding) for name, sharding in where.items()}
    wanted = {name: np.asarray(x).copy() for name, x in first.items()}
    handle = run.snapshot(first)
    template = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in first.items()}
    for name, x in first.items():
        step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=where[name])
        for _ in range(3):
            if "pinned" not in name:
                x = step(x)
            else:
                # What is pinned cannot be computed on: its buffer is given back, and another array takes it.
                x.delete()
                x = jax.device_put(jnp.full(2**16, -1.0), where[name])
    found = rjc.restore(handle, template).state
    for name, x in found.items():
        np.testing.assert_array_equal(np.asarray(x), wanted[name], err_msg=name)
        assert x.sharding == where[name]


def test_many_snapshots_take_no_more_memory_than_the_first_ones(run):
    state = {"w": jnp.ones(2**20), "n": np.ones(2**18, np.float32)}
    (store,) = run.stores().values()
    process, pid = psutil.Process(), ray.get(store.pid.remote())

    def taken():
        return ray.get(store.held_bytes.remote()), psutil.Process(pid).memory_info().rss, process.memory_info().rss

    for step in range(1, 201):
        assert rjc.snapshot(step, state) is not None
        if step == 20:
            rjc.wait()
            before = taken()
    rjc.wait()
    after = taken()
    assert after[0] <= max(before[0], 2 * 1.3 * 5 * 2**20)
    assert after[1] - before[1] < 16 * 2**20
    assert after[2] - before[2] < 24 * 2**20


def test_a_state_larger_than_the_object_store_needs_nothing_of_it(run):
    (node,) = [each for each in ray.nodes() if each["NodeID"] == run.nodes[0][0]]
    assert node["Resources"]["object_store_memory"] <= OBJECT_STORE_BYTES
    state = {"w": jnp.arange(1.5 * OBJECT_STORE_BYTES / 4, dtype=jnp.float32)}
    assert state["w"].nbytes > OBJECT_STORE_BYTES
    found = run.trip(state)
    np.testing.assert_array_equal(found["w"], state["w"])
    found["w"] += 1  # restored for good: it can be written
    free = ray.available_resources()
    assert free["object_store_memory"] > 0.9 * ray.cluster_resources()["object_store_memory"]
    run.snapshot({"w": 1})  # the store lets go of it
    rjc.wait()


def test_snapshots_start_no_processes_that_could_keep_memory_or_devices(run):
    before = {child.pid for child in psutil.Process().children()}
    run.snapshot(seeded(1))
    rjc.wait()
    assert {child.pid for child in psutil.Process().children()} <= before
    (store,) = run.stores().values()
    assert not psutil.Process(ray.get(store.pid.remote())).children(recursive=True)


def test_the_numbers_of_devices_have_no_part_in_what_is_restored(run):
    devices = jax.devices()[:4]
    saved = NamedSharding(jax.sharding.Mesh(np.array(devices), ("d",)), P("d"))
    turned = NamedSharding(jax.sharding.Mesh(np.array(devices[::-1]), ("d",)), P("d"))
    state = {"w": jax.device_put(jnp.arange(8), saved)}
    found = run.trip(state, {"w": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=turned)})
    np.testing.assert_array_equal(found["w"], np.arange(8))
    assert [int(shard.data[0]) for shard in found["w"].addressable_shards if shard.device == devices[3]] == [0]


# --- the manager's hooks

# What Ray waits for at the end of a run is the one that may fail it.
LAST = "before_controller_shutdown"
HOOKS = [name for name in vars(rjc.CheckpointManager) if name.startswith(("before_", "after_")) and name != LAST]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_never_raises_whatever_it_is_given_and_however_often(hook):
    manager = rjc.CheckpointManager()
    for argument in (None, types.SimpleNamespace(), []):
        for _ in range(2):
            call = getattr(manager, hook)
            result = call() if hook == "before_controller_abort" else call(argument)
            assert result == ({} if hook == "before_init_train_context" else None)


class Broken:
    def __getattr__(self, name):
        raise RuntimeError("gone")


def test_a_hook_whose_work_fails_does_not_raise():
    for hook in HOOKS:
        manager = rjc.CheckpointManager()
        manager._coordinator = manager._decision = Broken()
        call = getattr(manager, hook)
        call() if hook == "before_controller_abort" else call(Broken())


def test_only_what_has_to_be_on_storage_at_the_end_can_fail_a_run():
    for persist, coordinator in ((None, Broken()), (rjc.PersistConfig(), None)):
        manager = rjc.CheckpointManager(persist=persist)
        manager._coordinator = coordinator
        assert asyncio.run(getattr(manager, LAST)()) is None
    manager = rjc.CheckpointManager(persist=rjc.PersistConfig())
    manager._coordinator = Broken()
    with pytest.raises(PersistError, match=r"not all of it is on storage: .*gone"):
        asyncio.run(getattr(manager, LAST)())
