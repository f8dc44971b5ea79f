from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ray_jax_ckpt.arrays import capture, tree
from ray_jax_ckpt.errors import NotSupportedError

SIZE = 1 << 21


@pytest.fixture(params=["runtime", "device_put"])
def copy_path(request, monkeypatch):
    """Both ways of copying: the one below jax's public functions, and what stands in for it."""
    monkeypatch.setattr(capture, "_copy", getattr(capture, f"_{request.param}_copy".replace("put_copy", "put")))
    return request.param


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(capture, "_warned", set())


def shardings(mesh):
    return {
        "single": SingleDeviceSharding(jax.devices()[2]),
        "sharded": NamedSharding(mesh, P(("replica", "fsdp"))),
        "partly": NamedSharding(mesh, P("fsdp")),
        "replicated": NamedSharding(mesh, P()),
        "pinned": NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host"),
        "pinned_single": SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
    }


def pointers(x):
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


@pytest.mark.parametrize("where", ["single", "sharded", "partly", "replicated", "pinned", "pinned_single"])
def test_copies_are_true_copies_with_the_same_sharding(mesh, where, copy_path):
    x = jax.device_put(jnp.arange(64.0), shardings(mesh)[where])
    (copy,) = capture.pin([x])
    assert copy.sharding == x.sharding.with_memory_kind("pinned_host")
    assert not pointers(copy) & pointers(x)
    np.testing.assert_array_equal(np.asarray(copy), np.arange(64.0))
    assert copy.committed


@pytest.mark.parametrize("where", ["single", "sharded", "partly", "replicated"])
def test_three_donating_steps_at_once_do_not_reach_the_copy(mesh, where, copy_path):
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = step(jax.device_put(jnp.zeros(SIZE), shardings(mesh)[where]))
    for value in range(1, 4):
        (copy,) = capture.pin([x])
        for _ in range(3):
            x = step(x)
        assert np.all(np.asarray(copy) == 3 * value - 2)


@pytest.mark.parametrize("where", ["single", "sharded", "pinned", "pinned_single"])
def test_the_source_may_be_deleted_at_once(mesh, where, copy_path):
    x = jax.device_put(jnp.arange(SIZE), shardings(mesh)[where])
    (copy,) = capture.pin([x])
    x.delete()
    np.testing.assert_array_equal(np.asarray(copy), np.arange(SIZE))


def test_a_mixed_list_keeps_its_order_types_and_devices(mesh, copy_path):
    devices = jax.devices()
    xs = [jax.device_put(jnp.full(3, i, jnp.int32), devices[i % 4]) for i in range(20)]
    xs += [jax.device_put(jnp.full(4, i, jnp.bfloat16), s) for i, s in enumerate(shardings(mesh).values())]
    xs += [jnp.zeros((0, 3)), jnp.arange(6).astype(jnp.int4), jnp.asarray(2.0), jnp.ones(2, bool)]
    copies = capture.pin(xs)
    for x, copy in zip(xs, copies, strict=True):
        assert (copy.shape, copy.dtype, copy.weak_type) == (x.shape, x.dtype, x.weak_type)
        assert copy.sharding == x.sharding.with_memory_kind("pinned_host")
        assert np.asarray(copy).tobytes() == np.asarray(x).tobytes()


def test_keys_come_back_as_keys(mesh, copy_path):
    keys = jax.device_put(jax.random.split(jax.random.key(3, impl="rbg"), 4), NamedSharding(mesh, P("fsdp")))
    single = jax.random.key(1)
    copies = capture.pin([keys, single])
    assert [c.dtype for c in copies] == [keys.dtype, single.dtype]
    assert [str(jax.random.key_impl(c)) for c in copies] == ["rbg", "threefry2x32"]
    assert tree.key_data(copies[0]).sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(tree.key_data(copies[0]), tree.key_data(keys))
    assert not pointers(tree.key_data(copies[0])) & pointers(tree.key_data(keys))


def test_nothing_to_pin():
    assert capture.pin([]) == []


def test_a_deleted_source_is_an_error_at_once(copy_path):
    x = jnp.ones(4)
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        capture.pin([x])


def test_a_jax_without_the_runtime_copy_falls_back(monkeypatch):
    def gone(*_):
        raise AttributeError("no such function")

    monkeypatch.setattr(capture, "_runtime_copy", gone)
    monkeypatch.setattr(capture, "_copy", gone)
    (copy,) = capture.pin([jnp.arange(4)])
    np.testing.assert_array_equal(copy, np.arange(4))
    assert capture._copy is capture._device_put


def test_without_pinned_memory_one_warning_and_unpinned_memory(monkeypatch):
    monkeypatch.setattr(capture, "_host_kinds", lambda sharding: ["unpinned_host"])
    x = jnp.arange(4)
    with pytest.warns(RuntimeWarning, match="unpinned_host") as caught:
        copies = [*capture.pin([x]), *capture.pin([x])]
    assert len(caught) == 1
    assert all(c.sharding.memory_kind == "unpinned_host" for c in copies)
    assert not pointers(copies[0]) & pointers(x)


def test_exhausted_pinned_memory_falls_back(monkeypatch):
    true_copy = capture.batched_copy

    def exhausted(arrays, target):
        if target.memory_kind == "pinned_host":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory")
        return true_copy(arrays, target)

    monkeypatch.setattr(capture, "batched_copy", exhausted)
    with pytest.warns(RuntimeWarning, match="no room in pinned_host"):
        (copy,) = capture.pin([jnp.arange(4)])
    assert copy.sharding.memory_kind == "unpinned_host"


def test_other_errors_of_the_runtime_are_not_swallowed(monkeypatch):
    def broken(arrays, target):
        raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    monkeypatch.setattr(capture, "batched_copy", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="device lost"):
        capture.pin([jnp.arange(4)])


def test_without_any_host_memory_single_device_arrays_go_to_the_cpu_backend(mesh, monkeypatch):
    monkeypatch.setattr(capture, "_host_kinds", lambda sharding: [])
    x = jax.device_put(jnp.arange(4), jax.devices()[3])
    with pytest.warns(RuntimeWarning, match="pageable"):
        (copy,) = capture.pin([x])
    assert not pointers(copy) & pointers(x)
    np.testing.assert_array_equal(copy, np.arange(4))
    with pytest.raises(NotSupportedError, match="one by one"):
        capture.pin([jax.device_put(jnp.arange(4), NamedSharding(mesh, P("fsdp")))])


def test_copy_host_is_a_copy_in_c_order():
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    copy = capture.copy_host(x)
    x[:] = -1
    np.testing.assert_array_equal(copy, np.arange(6.0).reshape(2, 3))
    assert copy.flags.c_contiguous
    assert copy.flags.owndata
