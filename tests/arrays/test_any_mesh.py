"""Generations of any number of processes and devices on any other: against numpy slicing, bit by bit."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stored_state import bits
from test_assemble import random_bits
from virtual_group import MemoryReader, VirtualStores, assert_pieces, only_in, restore_pieces, snapshot

from ray_jax_ckpt.arrays import assemble, tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.errors import (
    IntegrityError,
    RestoreTimeoutError,
    SnapshotLostError,
    StoreError,
    TreeMismatchError,
)
from ray_jax_ckpt.model import recovery
from ray_jax_ckpt.model.index import ALIGNMENT

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "uint8", "bool", "complex64", "int16"]
GROUPS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (4, 1), (2, 2), (1, 4)]
SIZES = [1, 2, 3, 4, 5, 6, 12]


@st.composite
def meshes(draw, devices: int) -> Mesh:
    """All of that many devices, in any order, over one to three axes."""
    shapes = [(devices,), (1, devices), (devices, 1)] + [(2, 2), (2, 1, 2)] * (devices == 4)
    shape = draw(st.sampled_from(shapes))
    order = draw(st.permutations(jax.devices()[:devices]))
    return Mesh(np.array(order).reshape(shape), tuple("abc"[: len(shape)]))


@st.composite
def specs(draw, mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Any axes on any dimensions that they divide; those left over replicate."""
    spec: list[tuple[str, ...]] = [() for _ in shape]
    for axis in draw(st.permutations(mesh.axis_names)):
        where = draw(st.integers(-1, len(shape) - 1))
        if where >= 0 and shape[where] % math.prod(mesh.shape[a] for a in (*spec[where], axis)) == 0:
            spec[where] += (axis,)
    return NamedSharding(mesh, P(*(axes or None for axes in spec)))


@st.composite
def contents(draw) -> dict[str, np.ndarray]:
    """The data of a few leaves of any shape and type, scalars among them."""
    shapes = draw(st.lists(st.lists(st.sampled_from(SIZES), max_size=3), min_size=1, max_size=3))
    dtypes = st.sampled_from(DTYPES)
    return {f"x{n}": random_bits(tuple(shape), draw(dtypes), seed=n) for n, shape in enumerate(shapes)}


def surviving(draw, stores: VirtualStores) -> None:
    """Loses stores, and single copies on others, as long as one copy of each part is left."""
    for name in draw(st.permutations(sorted(stores.parts))):
        kept = dict(stores.parts)
        lost = kept.pop(name)
        parts = draw(st.sets(st.sampled_from(sorted(lost)))) if draw(st.booleans()) else set(lost)
        if all(any(part in held for held in kept.values()) for part in parts):
            stores.parts[name] = {part: content for part, content in lost.items() if part not in parts}
            if not stores.parts[name]:
                del stores.parts[name]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_any_group_restores_what_any_other_took_from_any_surviving_copies(data):
    (n, d), (to_n, to_d) = data.draw(st.tuples(st.sampled_from(GROUPS), st.sampled_from(GROUPS)))
    arrays, rows = data.draw(contents()), data.draw(st.sampled_from([1, 2, 4, 12]))
    source, target = data.draw(meshes(n * d)), data.draw(meshes(to_n * to_d))
    keys = jax.random.split(jax.random.key(3), rows)
    placed = {name: jax.device_put(x, data.draw(specs(source, x.shape))) for name, x in arrays.items()}
    placed["keys"] = jax.device_put(keys, data.draw(specs(source, keys.shape)))
    host = {"counts": np.arange(3), "step": 7, "name": "run"}
    stores = snapshot(placed | host, processes=n, per_process=d, copies=data.draw(st.integers(1, 3)))
    surviving(data.draw, stores)
    shardings = {name: data.draw(specs(target, x.shape)) for name, x in placed.items()}
    template = host | {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name]) for name, x in placed.items()
    }
    arrays["keys"] = np.asarray(jax.random.key_data(keys))
    seen = dict.fromkeys(shardings, 0)
    for rank in range(to_n):
        with mock.patch.object(recovery, "RUN_BYTES", data.draw(st.sampled_from([0, 40, 32 << 10]))):
            reader = MemoryReader(stores, rank)
            found = restore_pieces(stores, template, process=rank, processes=to_n, per_process=to_d, reader=reader)
        assert {k: bits(found[k]) for k in host} == {k: bits(v) for k, v in host.items()}
        for name, sharding in shardings.items():
            assert_pieces(found[name], arrays[name], only_in(sharding, placed[name].shape, rank, to_d))
            seen[name] += len(found[name])
        assert_nothing_twice(reader)
    assert set(seen.values()) == {to_n * to_d}


def assert_nothing_twice(reader: MemoryReader) -> None:
    pulled = sorted((part, start, start + size) for asked in reader.pulled.values() for part, start, size in asked)
    assert all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(pulled))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_only_the_bytes_that_are_needed_come_from_other_nodes(data):
    mesh, to = data.draw(meshes(4)), data.draw(meshes(4))
    x = random_bits(tuple(data.draw(st.lists(st.sampled_from([4, 12, 64]), min_size=1, max_size=3))), "float32")
    stores = snapshot({"x": jax.device_put(x, data.draw(specs(mesh, x.shape)))}, processes=4, per_process=1, copies=1)
    sharding = data.draw(specs(to, x.shape))
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
    with mock.patch.object(recovery, "RUN_BYTES", 0):
        for process in range(2):
            # Its node has no store: everything comes from others, and both devices' needs count once.
            reader = MemoryReader(stores, 100 + process)
            restore_pieces(stores, template, process=process, processes=2, per_process=2, reader=reader)
            boxes = {box for _, box in only_in(sharding, x.shape, process, 2)}
            needed = sum(math.prod(b - a for a, b in box) for box in boxes) * x.itemsize
            pieces = sum(map(len, reader.pulled.values()))
            gaps = ALIGNMENT * needed // x.itemsize if pieces else 0
            assert needed <= sum(reader.fetched.values()) <= min(needed + gaps, x.nbytes + ALIGNMENT * 4)


def test_columns_of_rows_on_other_nodes_come_without_the_rest_of_the_rows():
    mesh = Mesh(np.array(jax.devices()[:4]), "a")
    x = np.arange(8 * 200_000, dtype=np.float32).reshape(8, 200_000)
    stores = snapshot({"x": jax.device_put(x, NamedSharding(mesh, P("a")))}, processes=4, per_process=1, copies=1)
    columns = NamedSharding(mesh, P(None, "a"))
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns)}
    reader = MemoryReader(stores, 100)
    found = restore_pieces(stores, template, process=1, processes=4, per_process=1, reader=reader)
    assert_pieces(found["x"], x, only_in(columns, x.shape, 1, 1))
    assert sum(reader.fetched.values()) == x.nbytes // 4
    assert len(set(reader.fetched.values())) == 1


def test_devices_of_one_process_that_need_the_same_rows_share_them():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("a", "b"))
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    stores = snapshot({"x": jax.device_put(x, NamedSharding(mesh, P()))}, processes=1, per_process=4, copies=1)
    # Narrow columns: leaving the others out would cost more than reading whole rows, which all four need.
    columns = NamedSharding(mesh, P(None, "b"))
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns)}
    reader = MemoryReader(stores, 100)
    found = restore_pieces(stores, template, process=0, processes=1, per_process=4, reader=reader)
    assert_pieces(found["x"], x, only_in(columns, x.shape, 0, 4))
    assert sum(reader.fetched.values()) == x.nbytes


def shards_by_number(processes: int) -> tuple[np.ndarray, NamedSharding]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:processes]), "fsdp"), P("fsdp"))
    return np.repeat(np.arange(processes, dtype=np.int32), 1000), sharding


def test_shards_are_found_by_range_whoever_asks_from_wherever():
    """Every rank on the node of another one, the group in another order, one node gone."""
    x, sharding = shards_by_number(4)
    stores = snapshot({"x": jax.device_put(x, sharding)}, processes=4, per_process=1, copies=2)
    del stores.parts["2"]
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
    for rank in range(4):
        reader = MemoryReader(stores, (rank + 1) % 4)
        found = restore_pieces(stores, template, process=rank, processes=4, per_process=1, reader=reader)
        ((_, content),) = found["x"].values()
        assert set(content.tolist()) == {rank}


def test_a_part_without_a_survivor_is_named_with_its_leaf():
    x, sharding = shards_by_number(4)
    state = {"layers": [{"w": jax.device_put(x, sharding)}], "n": 1}
    stores = snapshot(state, processes=4, per_process=1, copies=2)
    (part,) = (part for part in stores.copies() if part.startswith("s2"))
    for held in stores.parts.values():
        held.pop(part, None)
    template = jax.tree.map(lambda x: x, state)
    with pytest.raises(SnapshotLostError, match=r"\['layers'\]\[0\]\['w'\] of step 7.*s2>.*on none"):
        restore_pieces(stores, template, process=2, processes=4, per_process=1, reader=MemoryReader(stores, 2))
    # Ranks that need nothing of it are not concerned.
    restore_pieces(stores, template, process=1, processes=4, per_process=1, reader=MemoryReader(stores, 1))


# --- holders that fail half way


def one_part() -> tuple[np.ndarray, VirtualStores, dict[str, Any]]:
    """An array in one part that the stores "0" and "1" have."""
    x = np.arange(5000, dtype=np.int32)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), "a"), P())
    stores = snapshot({"x": jax.device_put(x, sharding)}, processes=2, per_process=1, copies=2)
    return x, stores, {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}


def read_with(stores: VirtualStores, template: Any, node: int, **failing: list[Any]) -> tuple[np.ndarray, MemoryReader]:
    reader = MemoryReader(stores, node, {name.removeprefix("s"): errors for name, errors in failing.items()})
    found = restore_pieces(stores, template, process=0, processes=2, per_process=1, reader=reader)
    return next(iter(found["x"].values()))[1], reader


@pytest.mark.parametrize("node", [0, 100], ids=["own", "other"])
@pytest.mark.parametrize("error", [StoreError, IntegrityError, RestoreTimeoutError, SnapshotLostError])
def test_the_next_holder_serves_what_a_failed_one_did_not(node, error):
    x, stores, template = one_part()
    found, reader = read_with(stores, template, node, s0=[error("gone")] * 9)
    np.testing.assert_array_equal(found, x)
    assert reader.suspected in ([], ["0"])
    found, reader = read_with(stores, template, node, s0=[error("gone")] * 9, s1=[StoreError("busy")])
    np.testing.assert_array_equal(found, x)
    assert sorted(reader.suspected) == ["0", "1"]


def test_when_all_holders_failed_it_is_said_what_each_of_them_said():
    _, stores, template = one_part()
    failing = {"s0": [StoreError("reset"), StoreError("reset again")], "s1": [SnapshotLostError("freed")]}
    with pytest.raises(SnapshotLostError) as caught:
        read_with(stores, template, 100, **failing)
    for text in ("['x'] of step 7", "s0.1>", "0: reset / reset again", "1: freed"):
        assert text in str(caught.value)
    with pytest.raises(RestoreTimeoutError, match="late"):
        read_with(stores, template, 0, s0=[StoreError("dead")] * 2, s1=[RestoreTimeoutError("late")])
    with pytest.raises(IntegrityError, match="digest"):
        read_with(stores, template, 100, s0=[IntegrityError("digest")] * 2, s1=[IntegrityError("digest")] * 2)


def test_a_holder_that_failed_is_asked_last_in_later_batches():
    mesh = Mesh(np.array(jax.devices()[:2]), "a")
    state = {f"x{n}": jax.device_put(np.full(1000, n, np.int32), NamedSharding(mesh, P())) for n in range(6)}
    stores = snapshot(state, processes=2, per_process=1, copies=2)
    reader = MemoryReader(stores, 100, {"0": [StoreError("reset")]})
    with mock.patch.object(assemble, "BATCH_BYTES", 4000):
        found = restore_pieces(stores, state, process=0, processes=2, per_process=1, reader=reader)
    assert [set(next(iter(leaf.values()))[1].tolist()) for leaf in found.values()] == [{n} for n in range(6)]
    assert reader.fetched.keys() == {"1"} or sum(reader.fetched.values()) == 6 * 4000
    assert reader.suspected == ["0"]


# --- what needs no devices


def test_the_description_is_read_without_bytes_or_devices():
    x, sharding = shards_by_number(4)
    stores = snapshot({"x": jax.device_put(x, sharding), "step": 7}, processes=4, per_process=1, copies=1)

    def refuse(*_: Any) -> Any:
        raise AssertionError("bytes were asked for")

    assembler = Assembler(stores.indices, 0, 1)
    assert assembler.restore({}, None, Options(partial=True), refuse) == {}
    assert assembler.restore({"step": 0}, None, Options(partial=True), refuse) == {"step": 7}


def test_numpy_needs_no_device(monkeypatch):
    x, sharding = shards_by_number(4)
    stores = snapshot({"x": jax.device_put(x, sharding)}, processes=4, per_process=1, copies=1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a device was asked for")

    for name in ("devices", "local_devices", "device_put", "device_count"):
        monkeypatch.setattr(jax, name, refuse)
    found = Assembler(stores.indices, 0, 1).restore(None, None, Options(), MemoryReader(stores, 100).fetch)
    np.testing.assert_array_equal(found["x"], x)


def test_a_dimension_that_does_not_divide_is_named_with_both_numbers():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("a", "b"))
    x = np.arange(64, dtype=np.int32).reshape(8, 8)
    stores = snapshot(
        {"x": jax.device_put(x, NamedSharding(mesh, P("a", "b"))), "y": jnp.ones(2)},
        processes=2,
        per_process=2,
        copies=1,
    )
    three = NamedSharding(Mesh(np.array(jax.devices()[:3]), "z"), P(None, "z"))
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=three), "y": jnp.ones(2)}
    with pytest.raises(TreeMismatchError, match=r"(?s)\['x'\].*int32\[8,8\].*axis 1 .*3 times.*size is 8.*divide"):
        restore_pieces(stores, template, process=0, processes=1, per_process=4, reader=MemoryReader(stores, 0))
    for count in (2, 1):
        line = NamedSharding(Mesh(np.array(jax.devices()[:count]), "z"), P("z"))
        template["x"] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=line)
        found = Assembler(stores.indices, 0, 1).restore(template, None, Options(), MemoryReader(stores, 0).fetch)
        assert found["x"].sharding == line
        assert bits(found["x"]) == bits(x)
        assert not tree.is_key(found["x"])
