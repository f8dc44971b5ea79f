from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays import pathways, snapshotter, tree
from ray_jax_ckpt.arrays.snapshotter import Snapshotter


class Opt(NamedTuple):
    count: Any
    mu: Any


@pytest.fixture
def snap():
    with Snapshotter() as instance:
        yield instance


@pytest.fixture(params=["shards", "pathways"])
def either(request, monkeypatch):
    """A Snapshotter on its own path, and one on the runtime's split and concatenate: both work on one CPU process."""
    if request.param == "pathways":
        monkeypatch.setattr(pathways, "functions", real_pathways_functions)
    with Snapshotter() as instance:
        yield instance


def real_pathways_functions():
    from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis
    from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis

    return split_by_mesh_axis, concatenate_by_mesh_axis


def put(x, mesh, *spec, kind=None):
    return jax.device_put(x, NamedSharding(mesh, P(*spec), memory_kind=kind))


def named_state(mesh):
    """Arrays with a mesh only: what both paths take."""
    return {
        "replicated": put(jnp.arange(8.0), mesh),
        "fsdp": put(jnp.arange(32.0).reshape(8, 4).astype(jnp.bfloat16), mesh, "fsdp"),
        "replica": put(jnp.arange(8), mesh, "replica"),
        "both": put(jnp.arange(16).reshape(4, 4), mesh, "replica", "fsdp"),
        "rows": put(jnp.arange(8), mesh, ("replica", "fsdp")),
        "crossed": put(jnp.arange(8), mesh, ("fsdp", "replica")),
        "opt": Opt(put(jnp.zeros((), jnp.int32), mesh), (put(jnp.ones(4), mesh, "fsdp"), None, {})),
        "keys": put(jax.random.split(jax.random.key(5, impl="rbg"), 4), mesh, "fsdp"),
        "weak": put(tree.with_weak_type(jnp.asarray(2.0), True), mesh),
        "host": put(jnp.arange(8), mesh, "fsdp", kind="pinned_host"),
        "numpy": np.arange(3, dtype=">i2"),
        "step": 3,
        "name": "gpt",
    }


def any_state(mesh):
    """Leaves with every kind of sharding."""
    other = Mesh(np.array(jax.devices()[2:4]), ("x",))
    return named_state(mesh) | {
        "other_mesh": put(jnp.arange(4), other, "x"),
        "single": jax.device_put(jnp.arange(3), jax.devices()[3]),
        "uncommitted": jnp.arange(3),
        "uncommitted_key": jax.random.key(1),
        "empty": put(jnp.zeros((0, 4)), mesh, "fsdp"),
        "int4": put(jnp.arange(4).astype(jnp.int4), mesh, "fsdp"),
        "bool": jnp.asarray(True),
    }


def abstract(state):
    def of(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(of, state)


def content(x):
    x = tree.key_data(x) if tree.is_key(x) else x
    return np.asarray(x).tobytes() if isinstance(x, jax.Array | np.ndarray) else x


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for path, x, y in zip(tree.flatten(got).paths, tree.flatten(got).leaves, tree.flatten(wanted).leaves, strict=True):
        assert type(x) is type(y), path
        assert content(x) == content(y), path
        if isinstance(y, jax.Array | np.ndarray):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if isinstance(y, jax.Array):
            assert x.committed == y.committed, path
            assert x.sharding == y.sharding, path
            assert getattr(x, "weak_type", None) == getattr(y, "weak_type", None), path


def saved(snap, state, step=1):
    assert snap.save(step, state) is True
    snap.join()
    return snap


def leaf_of(snap, path):
    return snap._worker.latest.leaves[path]


def lose(snap, path, *replicas):
    """What a lost slice looks like: its buffers are gone."""
    leaf = leaf_of(snap, path)
    if hasattr(leaf, "pieces"):
        for piece in leaf.pieces:
            if piece.replica in replicas:
                piece.data.delete()
    else:
        for number in replicas:
            leaf.replicas[number].delete()


# --- what comes back


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("template", ["concrete", "abstract"])
def test_two_loads_give_the_state_bit_for_bit(either, mesh, template, reset):
    state = named_state(mesh)
    saved(either, state, step=7)
    wanted = state if template == "concrete" else abstract(state)
    for _ in range(2):
        assert_same(either.load(wanted, reset_snapshot_state=reset), state)
        assert either.latest.step == 7


@pytest.mark.parametrize("reset", [True, False])
def test_any_sharding(snap, mesh, reset):
    state = any_state(mesh)
    saved(snap, state)
    for _ in range(2):
        assert_same(snap.load(state, reset_snapshot_state=reset), state)


def test_a_leaf_without_mesh_axis_sends_the_state_down_the_own_path(either, mesh):
    state = any_state(mesh)
    saved(either, state)
    assert_same(either.load(state), state)


def test_same_results_as_orbax(mesh):
    training = pytest.importorskip("orbax.checkpoint.experimental.v1.training")
    state = named_state(mesh)
    del state["host"]
    theirs, ours = training.pathways.Snapshotter(replica_axis_index=0), Snapshotter(replica_axis_index=0)
    for instance in (theirs, ours):
        instance.save(5, state)
        instance.join()
        # Orbax hands out its own numpy leaf, not a copy.
        assert_same(instance.load(abstract(state)), state | {"weak": jnp.asarray(state["weak"])})
    assert type(ours.latest) is type(theirs.latest)
    assert ours.latest.step == theirs.latest.step == 5
    ours.close()


def test_latest_without_orbax(snap, monkeypatch):
    monkeypatch.delitem(sys.modules, "orbax.checkpoint", raising=False)
    assert snap.latest is None
    saved(snap, {}, step=4)
    assert isinstance(snap.latest, snapshotter.SnapshotMetadata)
    assert (snap.latest.step, snap.latest.metadata) == (4, None)


def test_restored_arrays_can_be_donated_and_do_not_take_the_snapshot_along(either, mesh):
    state = named_state(mesh)
    arrays = {k: v for k, v in state.items() if isinstance(v, jax.Array) and k not in ("keys", "host")}
    saved(either, arrays)
    double = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state), donate_argnums=0)
    for _ in range(2):
        restored = either.load(abstract(arrays), reset_snapshot_state=False)
        jax.block_until_ready(double(restored))
        assert all(x.is_deleted() for x in jax.tree.leaves(restored))
    assert_same(either.load(abstract(arrays)), arrays)


def test_donating_and_deleting_right_after_the_save(either, mesh):
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = step(put(jnp.zeros(1 << 20), mesh, "fsdp"))
    assert either.save(1, {"x": x})
    for _ in range(3):
        x = step(x)
    x.delete()
    either.join()
    template = {"x": jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))}
    assert np.all(np.asarray(either.load(template)["x"]) == 1)


def test_numpy_leaves_are_copied_in_both_directions(snap):
    state = {"a": np.arange(3), "readonly": np.broadcast_to(np.ones(1), (4,))}
    assert snap.save(1, state)
    state["a"][:] = -1
    snap.join()
    for _ in range(2):
        restored = snap.load(state, reset_snapshot_state=False)
        np.testing.assert_array_equal(restored["a"], np.arange(3))
        restored["a"][:] = -2


def test_what_is_no_array_passes_through(snap):
    marker = object()
    state = {"o": marker, "s": "x", "f": len, "n": np.float32(1), "objects": np.array([marker])}
    saved(snap, state)
    restored = snap.load(state)
    assert restored["o"] is marker
    assert restored["f"] is len
    assert restored["objects"] is state["objects"]
    assert type(restored["n"]) is np.float32


@pytest.mark.parametrize("state", [{}, None, {"a": None, "b": ()}, {"a": 1}, 5])
def test_states_without_arrays(either, state):
    saved(either, state, step=2)
    assert either.load(state) == state
    assert either.latest.step == 2


def test_a_state_that_is_one_array(snap):
    saved(snap, jnp.arange(4))
    np.testing.assert_array_equal(snap.load(jnp.zeros(4, jnp.int32)), np.arange(4))


# --- where it goes


@pytest.mark.parametrize("target", ["transposed", "one device", "uneven", "pinned", "replicated", "survivors"])
@pytest.mark.parametrize("source", ["fsdp", "both", "replicated", "keys", "rows"])
def test_other_meshes_and_memory(either, mesh, source, target):
    x = named_state(mesh)[source]
    sharding = {
        "transposed": NamedSharding(Mesh(mesh.devices.T, ("a", "b")), P("b")),
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "uneven": NamedSharding(Mesh(np.array(jax.devices()[1:3]), ("z",)), P("z")),
        "pinned": NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host"),
        "replicated": NamedSharding(mesh, P()),
        "survivors": NamedSharding(Mesh(mesh.devices[1:], mesh.axis_names), P("fsdp")),
    }[target]
    saved(either, {"x": x})
    for reset in (False, True):
        restored = either.load(
            {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}, reset_snapshot_state=reset
        )
        # jax spells the spec of a PRNG key array differently.
        assert restored["x"].sharding.is_equivalent_to(sharding, x.ndim)
        assert restored["x"].sharding.memory_kind == sharding.memory_kind
        assert restored["x"].dtype == x.dtype
        assert content(restored["x"]) == content(x)


def test_numpy_and_jax_templates_for_each_other(either, mesh):
    state = {"x": put(jnp.arange(8), mesh, "fsdp"), "n": np.arange(4, dtype=np.int32)}
    saved(either, state)
    restored = either.load({"x": np.zeros(8, np.int32), "n": put(jnp.zeros(4, jnp.int32), mesh, "fsdp")})
    assert type(restored["x"]) is np.ndarray
    np.testing.assert_array_equal(restored["x"], np.arange(8))
    assert restored["n"].sharding == NamedSharding(mesh, P("fsdp"))
    np.testing.assert_array_equal(restored["n"], np.arange(4))


def test_a_template_without_sharding_means_the_saved_one(snap, mesh):
    state = {"x": put(jnp.arange(8), mesh, "fsdp"), "u": jnp.arange(2), "n": np.arange(2, dtype=np.int32)}
    saved(snap, state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = snap.load(shapes)
    assert restored["x"].sharding == state["x"].sharding
    assert not restored["u"].committed
    assert isinstance(restored["n"], jax.Array)


def test_templates_that_do_not_fit(snap, mesh):
    saved(snap, {"a": jnp.ones(2), "b": 3})
    with pytest.raises(ValueError, match=r"step 1:\n\['a'\].*float32\[3\].*float32\[2\]"):
        snap.load({"a": jnp.ones(3), "b": 3})
    with pytest.raises(ValueError, match=r"\['b'\]"):
        snap.load({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"\['c'\]"):
        snap.load({"a": jnp.ones(2), "b": 3, "c": jnp.ones(1)})
    assert snap.load({"a": jnp.ones(2), "b": 3})["b"] == 3


# --- lost replicas


def test_survivors_are_chosen_per_leaf(either, mesh):
    state = {k: named_state(mesh)[k] for k in ("replicated", "fsdp", "keys", "weak")}
    saved(either, state)
    lose(either, "['replicated']", 0)
    lose(either, "['fsdp']", 1)
    lose(either, "['keys']", 0)
    for reset in (False, True):
        assert_same(either.load(abstract(state), reset_snapshot_state=reset), state)


def test_survivors_are_chosen_per_shard(snap, mesh):
    state = {"x": put(jnp.arange(8), mesh, "fsdp")}
    saved(snap, state)
    first, second, *_ = [p for p in leaf_of(snap, "['x']").pieces if p.box == ((0, 4),)]
    others = [p for p in leaf_of(snap, "['x']").pieces if p.box == ((4, 8),)]
    next(p for p in (first, second) if p.replica == 0).data.delete()
    next(p for p in others if p.replica == 1).data.delete()
    assert_same(snap.load(state), state)


@pytest.mark.parametrize("target", ["same", "resharded", "numpy"])
@pytest.mark.parametrize("path", ["fsdp", "replicated", "keys"])
def test_a_part_that_no_replica_holds_is_an_error_naming_the_leaf(either, mesh, path, target):
    x = named_state(mesh)[path]
    saved(either, {"other": x, path: x})
    lose(either, f"['{path}']", 0, 1)
    template = {
        "same": x,
        "resharded": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(jax.devices()[0])),
        "numpy": x if path == "keys" else np.asarray(x),
    }[target]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"\['{path}'\]"):
            either.load({"other": x, path: template})
    assert either.latest.step == 1


@pytest.mark.parametrize("path", ["replica", "both", "rows", "crossed"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_leaf_sharded_along_the_replica_axis_never_comes_back_smaller(either, mesh, path, lost):
    x = named_state(mesh)[path]
    saved(either, {path: x})
    lose(either, f"['{path}']", lost)
    with pytest.raises(RuntimeError, match=rf"\['{path}'\]"):
        either.load({path: x})


def test_a_replica_that_does_not_answer_is_passed_over(snap, mesh, monkeypatch):
    state = {"x": put(jnp.arange(8), mesh, "fsdp"), "y": put(jnp.arange(4), mesh)}
    saved(snap, state)
    true_put = jax.device_put
    nowhere = NamedSharding(Mesh(np.array(jax.devices()[2:3]), "x"), P())

    def unreachable(x, *args, **kwargs):
        sources = {device for leaf in jax.tree.leaves(x) for device in getattr(leaf, "sharding", nowhere).device_set}
        if sources & set(mesh.devices[0].flat):
            raise jax.errors.JaxRuntimeError("DATA_LOSS: slice 0 is gone")
        return true_put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", unreachable)
    assert_same(snap.load(state), state)
    saved(snap, {"x": put_on_first_replica(true_put, mesh)}, step=2)
    with pytest.raises(RuntimeError, match=r"\['x'\]") as caught:
        snap.load({"x": state["x"]})
    assert "slice 0 is gone" in str(caught.value.__cause__)


def put_on_first_replica(device_put, mesh):
    return device_put(jnp.arange(8), NamedSharding(Mesh(mesh.devices[:1], mesh.axis_names), P("fsdp")))


def test_a_copy_that_fails_while_under_way_is_repeated_from_another_replica(snap, mesh, monkeypatch):
    state = {"x": put(jnp.arange(8), mesh, "fsdp")}
    saved(snap, state)
    true_wait, failed = jax.block_until_ready, []

    def flaky(x):
        if isinstance(x, jax.Array) and x.shape == (4,) and not failed:
            failed.append(x)
            raise jax.errors.JaxRuntimeError("INTERNAL: copy failed")
        return true_wait(x)

    monkeypatch.setattr(jax, "block_until_ready", flaky)
    assert_same(snap.load(state, reset_snapshot_state=False), state)
    assert failed


def test_a_target_without_room_is_not_taken_for_a_lost_replica(snap, mesh, monkeypatch):
    state = {"x": put(jnp.arange(8), mesh, "fsdp")}
    saved(snap, state)

    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", full)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            snap.load(state)
    assert_same(snap.load(state), state)


def test_a_reset_that_fails_keeps_the_old_snapshot_and_returns_the_state(snap, mesh, monkeypatch, caplog):
    state = {"x": put(jnp.arange(8), mesh, "fsdp")}
    saved(snap, state)
    before = snap._worker.latest
    with monkeypatch.context() as patch:
        patch.setattr(snapshotter.replicas.capture, "pin", broken)
        assert_same(snap.load(state), state)
    assert "could not be captured again" in caplog.text
    assert snap._worker.latest is before


def broken(*_, **__):
    raise RuntimeError("no pinned memory")


# --- the background thread


class Gate:
    """Holds the background thread inside a snapshot."""

    def __init__(self, monkeypatch):
        self.entered, self.release = threading.Event(), threading.Event()
        true_wait = snapshotter._Snapshot.wait

        def wait(snapshot):
            if threading.current_thread().name.startswith("ray_jax_ckpt"):
                self.entered.set()
                assert self.release.wait(30)
            true_wait(snapshot)

        monkeypatch.setattr(snapshotter._Snapshot, "wait", wait)


def test_busy_calls_are_skipped_and_say_so(snap, monkeypatch, caplog):
    gate = Gate(monkeypatch)
    state = {"x": jnp.ones(4)}
    assert snap.save(1, state) is True
    assert gate.entered.wait(10)
    with caplog.at_level(logging.WARNING):
        assert snap.save(2, state) is False
    assert "step 2" in caplog.text
    assert snap.latest is None
    with pytest.raises(TimeoutError, match="timeout_s"):
        snap.join(timeout_s=0.05)
    gate.release.set()
    snap.join()
    assert snap.latest.step == 1
    assert snap.save(3, state) is True


@pytest.mark.parametrize("surfaces_in", ["save", "join"])
def test_background_errors_surface_once_in_save_or_join(snap, monkeypatch, surfaces_in):
    state = {"x": jnp.arange(4)}
    saved(snap, state, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(snapshotter._Snapshot, "wait", broken)
        assert snap.save(2, {"x": jnp.zeros(4, jnp.int32)})
        assert snap._worker.wait_idle(10)
    assert snap.latest.step == 1
    assert_same(snap.load(state, reset_snapshot_state=False), state)
    with pytest.raises(RuntimeError, match="step 2 failed: no pinned memory") as caught:
        snap.join() if surfaces_in == "join" else snap.save(3, state)
    assert str(caught.value.__cause__) == "no pinned memory"
    snap.join()
    assert snap.latest.step == 1
    assert saved(snap, state, step=4).latest.step == 4


def test_a_shard_that_vanishes_while_it_is_copied_is_a_background_error(snap, monkeypatch):
    gate = Gate(monkeypatch)
    taken = []
    true_take = snapshotter._Snapshot.take
    monkeypatch.setattr(snapshotter._Snapshot, "take", lambda *a, **k: taken.append(true_take(*a, **k)) or taken[-1])
    assert snap.save(1, {"x": jnp.arange(4)})
    taken[0].leaves["['x']"].pieces[0].data.delete()
    gate.release.set()
    with pytest.raises(RuntimeError, match="step 1 failed"):
        snap.join()
    assert snap.latest is None


def test_a_save_that_cannot_start_raises_and_leaves_the_snapshotter_free(snap):
    x = jnp.ones(4)
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        snap.save(1, {"x": x})
    with pytest.raises(TypeError):
        snap.save("1", {})  # type: ignore[arg-type]
    assert saved(snap, {"x": jnp.ones(4)}, step=2).latest.step == 2


def test_load_without_a_snapshot(snap):
    with pytest.raises(RuntimeError, match="No snapshots"):
        snap.load({})
    assert snap.latest is None
    snap.join()


def test_a_reset_discards_the_snapshot_in_progress(snap, monkeypatch):
    state = {"x": jnp.arange(4)}
    saved(snap, state, step=10)
    gate = Gate(monkeypatch)
    assert snap.save(12, {"x": jnp.zeros(4, jnp.int32)})
    assert gate.entered.wait(10)
    threading.Timer(0.1, gate.release.set).start()
    assert_same(snap.load(state), state)
    snap.join()
    assert snap.latest.step == 10
    assert_same(snap.load(state), state)


def test_close(mesh):
    snap = Snapshotter(replica_axis_index=0)
    state = {"x": put(jnp.arange(8), mesh, "fsdp")}
    assert snap.save(1, state)
    snap.close()
    snap.close()
    assert not snap._worker.thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        snap.save(2, state)
    with pytest.raises(RuntimeError, match="closed"):
        snap.load(state)
    assert snap.latest is None
    snap.join()


def test_close_logs_an_error_that_nobody_has_seen(monkeypatch, caplog):
    monkeypatch.setattr(snapshotter._Snapshot, "wait", broken)
    with Snapshotter() as snap:
        assert snap.save(1, {"x": jnp.ones(2)})
    assert "step 1 failed" in caplog.text


def test_an_abandoned_snapshotter_ends_its_thread_and_frees_its_memory():
    snap = Snapshotter()
    saved(snap, {"x": jnp.ones(4)})
    thread, buffer = snap._worker.thread, weakref.ref(leaf_of(snap, "['x']").pieces[0].data)
    del snap
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    deadline = time.monotonic() + 5
    while buffer() is not None and time.monotonic() < deadline:
        gc.collect()
    assert buffer() is None


def test_replica_axis_by_negative_index_and_missing_axis(mesh):
    state = {"x": put(jnp.arange(8), mesh, "replica"), "flat": put(jnp.arange(4), Mesh(mesh.devices.ravel(), "z"), "z")}
    for index in (-1, 1, 5):
        with Snapshotter(replica_axis_index=index) as snap:
            saved(snap, state)
            expected = {0} if index == 5 else {0, 1}
            assert {piece.replica for piece in leaf_of(snap, "['x']").pieces} == expected
            assert_same(snap.load(state), state)


# --- memory


def host_bytes():
    gc.collect()
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host" and not x.is_deleted()]
    return sum({s.data.unsafe_buffer_pointer(): s.data.nbytes for x in arrays for s in x.addressable_shards}.values())


def test_never_a_third_copy_of_the_state(either, mesh, monkeypatch):
    state = {"x": put(jnp.arange(1 << 16), mesh, "fsdp"), "y": put(jnp.arange(1 << 14), mesh)}
    before = host_bytes()
    one = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards)
    for step in range(3):
        saved(either, state, step=step)
        assert host_bytes() - before == one
    gate = Gate(monkeypatch)
    assert either.save(3, state)
    assert gate.entered.wait(10)
    assert host_bytes() - before == 2 * one
    assert either.save(4, state) is False
    assert host_bytes() - before == 2 * one
    gate.release.set()
    either.join()
    assert host_bytes() - before == one

    peaks = []
    true_take = snapshotter._Snapshot.take

    def take(*args, **kwargs):
        taken = true_take(*args, **kwargs)
        peaks.append(host_bytes() - before)
        return taken

    monkeypatch.setattr(snapshotter._Snapshot, "take", take)
    restored = either.load(abstract(state))
    assert peaks == [2 * one]
    assert host_bytes() - before == one
    del restored
    either.close()
    assert host_bytes() == before
