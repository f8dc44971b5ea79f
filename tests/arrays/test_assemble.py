"""States that are captured, destroyed, stored and brought back, bit by bit, on the same and on other meshes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from stored_state import ALONE, assert_same, bits, save, split, stored

from ray_jax_ckpt.arrays import assemble, tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.arrays.plan import Planner, capture
from ray_jax_ckpt.errors import SnapshotLostError, TreeMismatchError
from ray_jax_ckpt.model.index import Index

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64", "bfloat16"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]
NARROW = {"bool": 2, "float4_e2m1fn": 16, "int2": 4, "uint2": 4, "int4": 16, "uint4": 16}


def random_bits(shape, dtype, seed=0):
    """Any bit pattern of a dtype, NaNs with payloads and subnormals among them."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.name in NARROW:
        raw = np.asarray(rng.integers(0, NARROW[dtype.name], shape)).astype(np.uint8)
        signed = dtype.name in ("int2", "int4")
        return np.asarray(raw.astype(np.int8) - NARROW[dtype.name] // 2).astype(dtype) if signed else raw.view(dtype)
    return rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def abstract(state, shardings=None):
    """What eval_shape of the state's constructor gives, with or without shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings) if isinstance(x, jax.Array) else x, state
    )


def placed(x, mesh, *spec, **kind):
    return jax.device_put(x, NamedSharding(mesh, P(*spec), **kind))


def twin(make):
    """Two equal states, one to be destroyed."""
    return make(), make()


# --- the same state again


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (8, 3), (0,), (4, 0, 2)], ids=str)
def test_every_dtype_comes_back_bit_by_bit(mesh, dtype, shape):
    def make():
        x = random_bits(shape, dtype)
        # Copies, since JAX may use a numpy array's memory as it is.
        sharded = placed(x.copy(), mesh, "fsdp") if shape else placed(x.copy(), mesh)
        return {"plain": jnp.asarray(x.copy()), "sharded": sharded, "numpy": x}

    state, same = twin(make)
    assert_same(save(state).restore(same), same)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes_come_back_where_they_are_enabled(mesh, dtype):
    with jax.enable_x64(True):
        state, same = twin(
            lambda: [jnp.asarray(random_bits((8,), dtype)), placed(random_bits((8,), dtype), mesh, "fsdp")]
        )
        assert_same(save(state).restore(same), same)


@pytest.mark.parametrize("dtype", [*DTYPES, *WIDE, ">i4", "<U5", "S3", "M8[ns]", "m8[s]"])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3)], ids=str)
def test_numpy_leaves_of_any_plain_dtype(dtype, shape):
    def make():
        if np.dtype(dtype).kind == "U":
            return {"n": np.full(shape, "añ\U0001f600", dtype)}
        return {"n": random_bits(shape, dtype)}

    state, same = twin(make)
    restored = save(state).restore(same)
    assert_same(restored, same)
    assert restored["n"].flags.writeable
    assert restored["n"].flags.owndata


def test_numpy_leaves_in_any_memory_order():
    x = np.arange(24.0).reshape(2, 3, 4)
    views = [np.asfortranarray(x), x[:, ::-1, ::2], x.T, np.broadcast_to(np.float32(3), (2, 5))]
    for found, wanted in zip(save([v.copy("K") for v in views]).restore(views), views, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys(mesh, impl):
    def make():
        key = jax.random.key(42, impl=impl)
        rows = jax.random.split(key, 8)
        return {
            "one": key,
            "rows": rows,
            "sharded": placed(rows, mesh, "fsdp"),
            "tiled": placed(rows.reshape(4, 2), mesh, "replica", "fsdp"),
            "replicated": placed(key, mesh),
            "none": rows[:0],
            "raw": jax.random.key_data(key),
        }

    state, same = twin(make)
    restored = save(state).restore(same)
    assert_same(restored, same)
    np.testing.assert_array_equal(jax.random.normal(restored["one"], 5), jax.random.normal(same["one"], 5))
    # To the template that eval_shape makes, which knows no implementation but that of the dtype.
    shaped = jax.eval_shape(make)
    state, _ = twin(make)
    with pytest.warns(RuntimeWarning, match=r"2 leaves of .*\['sharded'\] first.*shardings="):
        again = save(state).restore(shaped)
    assert jax.tree.map(bits, again) == jax.tree.map(bits, same)
    assert jax.random.key_impl(again["sharded"]) == impl


@pytest.mark.parametrize("weak", [True, False])
def test_weak_types(mesh, weak):
    state, same = twin(lambda: [tree.with_weak_type(x, weak) for x in (jnp.ones(4), placed(jnp.ones(4), mesh, "fsdp"))])
    restored = save(state).restore(abstract(same, SingleDeviceSharding(jax.devices()[1])))
    assert [x.weak_type for x in restored] == [weak, weak]
    state, same = twin(lambda: [tree.with_weak_type(jnp.ones(4), weak)])
    assert_same(save(state).restore(same), same)


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_memory_kinds(mesh, kind):
    state, same = twin(lambda: [placed(jnp.arange(8.0), mesh, "fsdp", memory_kind=kind)])
    restored = save(state).restore(same)
    assert_same(restored, same)
    assert restored[0].sharding.memory_kind == kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    w: Any
    name: str = dataclasses.field(metadata={"static": True}, default="block")


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_with_keys_class
class Mapping(dict):
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(key), self[key]) for key in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(zip(keys, children, strict=True))


def test_trees_of_every_kind_of_node():
    def make():
        return {
            "pair": Pair(jnp.ones(2), Pair(None, ())),
            "block": [Block(jnp.zeros(3)), Block(np.ones(2), "other")],
            "empty": [{}, [], (), None, Mapping()],
            "mapping": Mapping(b=1, a=jnp.ones(1)),
            "numbers": {i: i for i in range(12)},
            "odd/ .~%": {"": 1, "a.b": 2, "é": 3},
        }

    state, same = twin(make)
    assert_same(save(state).restore(same), same)


def test_values_are_exact():
    values = [0, 2**63, -(2**200), True, False, 1.5, -0.0, math.inf, 1e-320, 1 + 2j, "run-7", "\ud800", b"\x00\xff", ""]
    values += [
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.str_("x\0"),
        np.complex64(1j),
        np.datetime64("2020-01-01"),
    ]
    values += [ml_dtypes.bfloat16(1.5), float(np.array(0x7FF8000000000123, np.uint64).view(np.float64))]
    assert_same(save(list(values)).restore(list(values)), values)


def test_a_single_leaf_and_nothing_at_all():
    for make in (lambda: jnp.arange(3), lambda: 5, dict, lambda: [None], lambda: np.ones(2)):
        state, same = twin(make)
        assert_same(save(state).restore(same), same)


def test_optimizer_states_keep_their_types_and_can_branch():
    params = {"w": jnp.ones((3, 2)), "frozen": jnp.ones(2)}
    optimizer = optax.chain(
        optax.clip(1.0),
        optax.masked(optax.adamw(1e-3), {"w": True, "frozen": False}),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    )
    state, fresh = twin(lambda: optimizer.init(params))
    restored = save(state).restore(fresh)
    assert_same(restored, fresh)
    jax.lax.cond(True, lambda x: x, lambda x: optimizer.init(params), restored)


def test_nnx_states_with_dropout_draw_the_same_numbers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.dropout(x)

    model = Model(nnx.Rngs(0))
    model(jnp.ones((4, 2)))
    graph, state = nnx.split(model)
    state = jax.tree.map(jnp.copy, state)
    shaped = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))[1]
    expected = model(jnp.ones((4, 2)))
    restored = save(state).restore(shaped)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    np.testing.assert_array_equal(nnx.merge(graph, restored)(jnp.ones((4, 2))), expected)


# --- elsewhere


def meshes():
    devices = np.array(jax.devices()[:4])
    return {
        "same": Mesh(devices.reshape(2, 2), ("replica", "fsdp")),
        "flipped": Mesh(devices[::-1].reshape(2, 2), ("replica", "fsdp")),
        "line": Mesh(devices, ("z",)),
        "three": Mesh(devices[1:].reshape(1, 3), ("a", "b")),
        "one": Mesh(devices[2:3], ("only",)),
    }


@pytest.mark.parametrize(
    ("mesh_name", "spec"),
    [
        *[("same", P()), ("same", P("fsdp")), ("same", P(None, "fsdp")), ("same", P("fsdp", "replica"))],
        *[
            ("same", P(("replica", "fsdp"))),
            ("flipped", P("replica", "fsdp")),
            ("line", P("z")),
            ("line", P(None, "z")),
        ],
        *[("three", P(None, None, "b")), ("three", P("a")), ("one", P("only")), ("one", P())],
    ],
    ids=str,
)
@pytest.mark.parametrize("saved_as", [P(), P("replica", "fsdp"), P("fsdp"), P(None, ("fsdp", "replica"))], ids=str)
def test_other_meshes_and_specs(mesh, mesh_name, spec, saved_as):
    x = random_bits((8, 4, 6), "float32")
    sharding = NamedSharding(meshes()[mesh_name], spec)
    saved = save({"x": placed(x, mesh, *saved_as)})
    for template, shardings in [
        ({"x": jax.device_put(jnp.zeros_like(x), sharding)}, None),
        ({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}, None),
        ({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}, sharding),
    ]:
        assert_same(saved.restore(template, shardings), {"x": jax.device_put(x, sharding)})


def test_keys_on_other_meshes(mesh):
    rows = jax.random.split(jax.random.key(1), 8).reshape(4, 2)
    saved = save({"k": placed(rows, mesh, "replica", "fsdp")})
    rows = jax.random.split(jax.random.key(1), 8).reshape(4, 2)
    line = meshes()["line"]
    for sharding in (NamedSharding(line, P("z")), NamedSharding(line, P()), SingleDeviceSharding(jax.devices()[3])):
        template = {"k": jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding)}
        assert_same(saved.restore(template), {"k": jax.device_put(rows, sharding)})


def test_without_shardings_arrays_go_to_the_default_device_uncommitted(mesh):
    x = random_bits((8, 2), "bfloat16")
    saved = save({"x": placed(x, mesh), "k": placed(jax.random.key(3), mesh)})
    for template in (
        {"x": jnp.zeros((8, 2), jnp.bfloat16), "k": jax.random.key(0)},
        jax.eval_shape(lambda: {"x": jnp.zeros((8, 2), jnp.bfloat16), "k": jax.random.key(0)}),
    ):
        assert_same(saved.restore(template), {"x": jnp.asarray(x), "k": jax.random.key(3)})
    with jax.default_device(jax.devices()[2]):
        assert saved.restore(template)["x"].devices() == {jax.devices()[2]}


def test_a_committed_template_pins_its_device():
    device = jax.devices()[3]
    restored = save({"x": jnp.arange(3)}).restore({"x": jax.device_put(jnp.zeros(3, jnp.int32), device)})
    assert_same(restored, {"x": jax.device_put(jnp.arange(3), device)})


def test_a_dimension_that_does_not_divide_is_named(mesh):
    saved = save({"x": placed(jnp.ones((8, 4)), mesh, "fsdp")})
    template = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    with pytest.raises(TreeMismatchError, match=r"\['x'\].*float32\[8,4\].*(3|divi)"):
        saved.restore(template, NamedSharding(meshes()["three"], P("b")))


def test_a_spec_of_more_dimensions_than_the_array_has_is_named(mesh):
    saved = save({"x": jnp.ones(8), "k": jax.random.key(0)})
    for shardings, path in (
        ({"x": NamedSharding(mesh, P(None, "fsdp")), "k": None}, "x"),
        ({"x": None, "k": NamedSharding(mesh, P("fsdp"))}, "k"),
    ):
        with pytest.raises(TreeMismatchError, match=rf"\['{path}'\].*cannot be sharded as asked.*fewer dimensions"):
            saved.restore({"x": jnp.ones(8), "k": jax.random.key(0)}, shardings)


# --- shardings=


def test_a_single_sharding_counts_for_all_arrays(mesh):
    sharding = NamedSharding(mesh, P())
    saved = save({"a": jnp.ones(2), "b": (jnp.ones(3), None, "text"), "k": jax.random.key(0)})
    template = {"a": jnp.zeros(2), "b": (jax.ShapeDtypeStruct((3,), jnp.float32), None, ""), "k": jax.random.key(1)}
    restored = saved.restore(template, sharding)
    assert_same(
        restored,
        {
            "a": placed(jnp.ones(2), mesh),
            "b": (placed(jnp.ones(3), mesh), None, "text"),
            "k": placed(jax.random.key(0), mesh),
        },
    )


def test_a_prefix_of_shardings_leaves_the_rest_to_the_template(mesh):
    rows, device = NamedSharding(mesh, P("fsdp")), SingleDeviceSharding(jax.devices()[2])
    state = {"layers": [{"w": jnp.ones(4), "b": jnp.ones(4)}, None, {"w": jnp.ones(4)}], "head": jnp.ones(4), "n": 1}
    template = jax.tree.map(lambda x: placed(x, mesh) if isinstance(x, jax.Array) else x, state)
    saved = save(jax.tree.map(lambda x: x + 0, state))
    restored = saved.restore(template, {"layers": [rows, None, {"w": device}], "head": None, "n": None})
    wanted = [restored["layers"][0]["w"], restored["layers"][0]["b"], restored["layers"][2]["w"], restored["head"]]
    assert [x.sharding for x in wanted] == [rows, rows, device, NamedSharding(mesh, P())]
    assert restored["n"] == 1


def test_a_template_that_lost_its_shardings_gathers_with_a_warning_or_takes_them_separately(mesh):
    def model():
        return nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    rows = NamedSharding(mesh, P("fsdp"))
    state = nnx.split(model())[1]
    expected = jax.tree.map(np.asarray, state)
    saved = save(jax.tree.map(lambda x: jax.device_put(x + 0, rows), state))
    shaped = nnx.split(nnx.eval_shape(model))[1]
    with pytest.warns(RuntimeWarning, match=r"2 leaves of 144 bytes, .*bias.* first, .*one device.*shardings="):
        gathered = saved.restore(shaped)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(gathered)} == {1}
    restored = saved.restore(shaped, rows)
    assert {x.sharding for x in jax.tree.leaves(restored)} == {rows}
    assert jax.tree.map(bits, restored) == jax.tree.map(bits, gathered) == jax.tree.map(bits, expected)
    # Where the template is, is an answer too.
    saved.restore(jax.tree.map(jnp.zeros_like, gathered))


def test_numpy_leaves_stay_numpy_under_one_sharding_for_all(mesh):
    state, same = twin(lambda: {"x": jnp.ones(2), "n": np.arange(3), "text": np.array(["a", "bc"])})
    restored = save(state).restore(same, NamedSharding(mesh, P()))
    assert isinstance(restored["n"], np.ndarray)
    assert restored["n"].dtype == np.int64
    assert restored["text"].tolist() == ["a", "bc"]


def test_shardings_that_fit_no_template_are_refused(mesh):
    saved = save({"a": jnp.ones(2), "b": jnp.ones(2)})
    for wrong in ({"a": NamedSharding(mesh, P())}, [None], {"a": None, "b": None, "c": None}, {"a": "x", "b": None}):
        with pytest.raises(TreeMismatchError, match="shardings="):
            saved.restore({"a": jnp.ones(2), "b": jnp.ones(2)}, wrong)


# --- no template


def test_without_a_template_everything_is_numpy(mesh):
    state = {
        "w": placed(random_bits((4, 2), "bfloat16"), mesh, "fsdp"),
        "list": [jnp.ones(1), (2, None, "x")],
        "key": jax.random.key(7),
        "n": np.array([1, 2], ">i2"),
        "numbers": {i: i for i in range(12)},
        "pair": Pair(1, 2),
    }
    wanted = {"w": np.asarray(state["w"]), "key": np.asarray(jax.random.key_data(state["key"])), "n": state["n"].copy()}
    restored = save(state).restore(None)
    for name, array in wanted.items():
        assert type(restored[name]) is np.ndarray
        assert bits(restored[name]) == bits(array)
    assert restored["list"][0].tolist() == [1.0]
    assert restored["list"][1] == (2, None, "x")
    assert list(restored["numbers"]) == list(range(12))
    assert restored["pair"] == {"left": 1, "right": 2}


def test_without_a_template_it_is_said_what_was_lost(caplog):
    saved = save({"pair": Pair(1, 2), "list": [1], "key": jax.random.key(0)})
    saved.restore(None)
    assert "Pair at ['pair']; PRNG keys at ['key']" in caplog.text
    assert "list']" not in caplog.text


# --- templates that do not fit


def test_partial_and_cast_only_when_asked_for():
    saved = save({"w": jnp.full(3, 1.5), "count": jnp.int32(16777217), "n": np.array([1.5, -2.0]), "more": 1})
    template = {"w": jnp.zeros(3, jnp.bfloat16), "count": jnp.float32(0), "n": np.zeros(2, np.int16)}
    with pytest.raises(TreeMismatchError) as caught:
        saved.restore(template)
    for text in (
        "step 7",
        "['w']",
        "float32[3]",
        "bfloat16[3]",
        "['count']",
        "['n']",
        "['more']",
        "partial=True",
        "cast",
    ):
        assert text in str(caught.value)
    with pytest.raises(TreeMismatchError, match="more"):
        saved.restore(template, cast=True)
    with pytest.raises(TreeMismatchError, match="bfloat16"):
        saved.restore(template, partial=True)
    restored = saved.restore(template, partial=True, cast=True)
    assert_same(
        restored,
        {"w": jnp.full(3, 1.5, jnp.bfloat16), "count": jnp.float32(16777216), "n": np.array([1, -2], np.int16)},
    )


def test_casts_on_a_mesh(mesh):
    saved = save({"w": placed(np.arange(8, dtype=np.float32), mesh, "fsdp")})
    template = {"w": placed(jnp.zeros(8, jnp.bfloat16), mesh, "replica")}
    assert_same(saved.restore(template, cast=True), {"w": placed(jnp.arange(8).astype(jnp.bfloat16), mesh, "replica")})


def test_models_of_another_depth_or_width_are_refused():
    def layers(n, width=2):
        return {f"l{i}": jnp.ones((width, width)) for i in range(n)}

    saved = save(layers(12))
    with pytest.raises(TreeMismatchError, match=r"\['l12'\].*no such leaf"):
        saved.restore(layers(16))
    with pytest.raises(TreeMismatchError, match=r"\['l9'\].*the template no such leaf"):
        saved.restore(layers(9))
    with pytest.raises(TreeMismatchError, match=r"\['l0'\].*float32\[3,3\].*float32\[2,2\]"):
        saved.restore(layers(12, 3))
    with pytest.raises(TreeMismatchError, match=r"\['l12'\]"):
        saved.restore(layers(13), partial=True)


def test_a_wide_array_is_never_narrowed_silently():
    saved = save({"n": np.array([2**40, 1])})
    with pytest.raises(TreeMismatchError, match=r"\['n'\].*int64"):
        saved.restore({"n": jax.ShapeDtypeStruct((2,), np.int64)})
    with jax.enable_x64(True):
        restored = saved.restore({"n": jax.ShapeDtypeStruct((2,), np.int64)})
    assert restored["n"].dtype == np.int64
    assert restored["n"].tolist() == [2**40, 1]


def test_bytes_that_nobody_holds_are_named(mesh):
    saved = save({"a": jnp.ones(2), "b": [placed(jnp.ones(4), mesh, "fsdp"), 3]})
    indices = [Index.from_bytes(raw) for raw in saved.indices]

    def fetch(wants, dtypes):
        raise KeyError(next(i for i, want in enumerate(wants) if want.box == ((2, 4),)))

    template = {"a": jnp.ones(2), "b": [placed(jnp.ones(4), mesh, "fsdp"), 3]}
    with pytest.raises(SnapshotLostError, match=r"\['b'\]\[0\] of step 7"):
        Assembler(indices, 0, 1).restore(template, None, Options(), fetch)


# --- restored arrays are their owner's


def test_restored_arrays_are_no_aliases_and_can_be_donated(mesh):
    def make():
        return {
            "plain": jnp.arange(4096.0),
            "sharded": placed(jnp.arange(4096.0), mesh, ("replica", "fsdp")),
            "replicated": placed(jnp.arange(4096.0), mesh),
            "pinned": placed(jnp.arange(4096.0), mesh, "fsdp", memory_kind="pinned_host"),
            "key": jax.random.split(jax.random.key(0), 512),
            "numpy": np.arange(4096.0),
        }

    state, same = twin(make)
    saved = save(state)
    restored = saved.restore(same)
    saved.scribble()
    assert_same(restored, same)
    donated = [restored[name] for name in ("plain", "sharded", "replicated")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in donated:
            places = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
            result = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
            assert [shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards] == places
            np.testing.assert_array_equal(result, np.arange(4096.0) + 1)
    assert all(x.is_deleted() for x in donated)


def test_a_donated_step_reuses_as_much_of_a_restored_state_as_of_a_fresh_one(mesh, monkeypatch):
    def make():
        leaves = {f"w{n}": placed(jnp.full((64, 64), n, jnp.float32), mesh, *spec) for n, spec in enumerate(specs)}
        return leaves | {"m": placed(jnp.zeros((64, 64), jnp.bfloat16), mesh, "replica", "fsdp"), "count": jnp.int32(3)}

    def reused(state):
        def places(tree):
            return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]

        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0)
        before = places(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            after = places(step(state))
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        return len(set(before) & set(after)), len(before)

    specs = [("fsdp",), (), (None, "fsdp"), (("replica", "fsdp"),)]
    monkeypatch.setattr(assemble, "BATCH_BYTES", 20_000)
    template = make()
    fresh, restored = reused(make()), reused(save(make()).restore(template))
    assert fresh == restored == (len(jax.tree.leaves(template)) * 4 - 3,) * 2


def test_steps_that_donate_and_mutate_right_after_the_capture_change_nothing(mesh):
    def make():
        x = jnp.arange(2.0**18)
        return {"w": placed(x, mesh, "fsdp"), "pinned": placed(x, mesh, memory_kind="pinned_host"), "n": np.ones(5)}

    state, same = twin(make)
    flat = tree.flatten(state)
    plan = Planner(ALONE).plan(flat)
    captured = capture(plan, flat)
    step, w = jax.jit(lambda x: x + 1, donate_argnums=0), state.pop("w")
    for _ in range(3):
        w, state["n"][:] = step(w), -1
    state["pinned"].delete()
    assert_same(stored(plan, captured).restore(same), same)


def test_a_snapshot_can_be_restored_twice(mesh):
    state, same = twin(lambda: {"x": placed(jnp.arange(8.0), mesh, "fsdp"), "n": np.ones(2)})
    saved = save(state)
    first, second = saved.restore(same), saved.restore(same)
    first["x"].delete()
    first["n"][:] = 7
    assert_same(second, same)


# --- several processes


def rank_state(rank, *, step=3, local=0.0):
    return {
        "w": np_to_jax(np.arange(24, dtype=np.float32).reshape(6, 4)),
        "k": jax.random.split(jax.random.key(5), 6),
        "own": jnp.full(3, local),
        "n": np.full(2, local),
        "step": step,
        "name": "run",
    }


def np_to_jax(x):
    return jnp.asarray(x)


LOCAL = ["['own']"]


def shared_template(mesh):
    return {
        **abstract(rank_state(0)),
        "w": jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))),
        "k": jax.ShapeDtypeStruct((6,), jax.random.key(0).dtype, sharding=NamedSharding(mesh, P())),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_values_and_its_part_of_the_global_ones(mesh, rank):
    saved = split([rank_state(r, step=3 + r, local=float(r)) for r in range(2)], LOCAL)
    restored = saved.restore(shared_template(mesh), rank=rank)
    own = rank_state(rank, step=3 + rank, local=float(rank))
    assert jax.tree.map(bits, restored) == jax.tree.map(bits, own)


@pytest.mark.parametrize(("saved_by", "restored_by"), [(2, 3), (3, 2), (2, 1), (1, 2), (4, 3)])
def test_another_number_of_processes_gets_what_was_equal_everywhere(mesh, saved_by, restored_by):
    saved = split([rank_state(r) for r in range(saved_by)], LOCAL)
    for rank in range(restored_by):
        restored = saved.restore(shared_template(mesh), rank=rank, world_size=restored_by)
        assert jax.tree.map(bits, restored) == jax.tree.map(bits, rank_state(rank))


@pytest.mark.parametrize(
    ("difference", "path", "why"),
    [
        ({"own": 1.0}, r"\['own'\]", "differ"),
        ({"n": 1.0}, r"\['n'\]", "differ"),
        ({"step": 4}, r"\['step'\]", "differ"),
        ({"step": 4, "n": 1.0, "own": 1.0}, r"3 processes .*\['n'\] \(rank 1's.*\['own'\]", r"\['step'\]"),
    ],
    ids=["array", "numpy", "value", "all"],
)
def test_another_number_of_processes_cannot_share_out_what_differed(mesh, difference, path, why):
    def state(rank):
        base = rank_state(rank)
        return base | {k: base[k] + v - (3 if k == "step" else 0) for k, v in difference.items()} if rank else base

    saved = split([state(0), state(1)], LOCAL)
    for rank, template in ((0, shared_template(mesh)), (2, shared_template(mesh)), (0, None)):
        with pytest.raises(TreeMismatchError, match=rf"{path}.*{why}.*data="):
            saved.restore(template, rank=rank, world_size=3)
    fewer = {name: leaf for name, leaf in shared_template(mesh).items() if name not in difference}
    saved.restore(fewer, rank=2, world_size=3, partial=True)


def test_what_carries_no_digests_counts_as_different_and_the_reason_is_said(mesh):
    def without_digests(saved):
        for rank, raw in enumerate(saved.indices):
            index = Index.from_bytes(raw)
            bare = {part: ["" for _ in digests] for part, digests in index.digests.items()}
            saved.indices[rank] = dataclasses.replace(index, digests=bare).to_bytes()
        return saved

    saved = without_digests(split([rank_state(r) for r in range(2)], LOCAL))
    assert saved.restore(shared_template(mesh), rank=1)["own"].tolist() == [0, 0, 0]
    with pytest.raises(TreeMismatchError, match=r"\['own'\] \(not compared: SnapshotConfig\(verify=False\)"):
        saved.restore(shared_template(mesh), world_size=3)
    alone = without_digests(split([rank_state(0)], LOCAL))
    assert alone.restore(shared_template(mesh), rank=1, world_size=2)["own"].tolist() == [0, 0, 0]


def test_equal_bytes_of_another_dtype_are_not_equal(mesh):
    states = [rank_state(r) | {"n": np.zeros(2, dtype)} for r, dtype in enumerate((np.int64, np.float64))]
    with pytest.raises(TreeMismatchError, match=r"\['n'\] \(rank 1's differs from rank 0's\)"):
        split(states, LOCAL).restore(None, world_size=1)


def test_a_global_array_for_several_processes_needs_a_sharding(mesh):
    saved = split([rank_state(r) for r in range(2)], LOCAL)
    with pytest.raises(TreeMismatchError, match=r"\['k'\].*shardings="):
        saved.restore(abstract(rank_state(0)))
    spread = {"w": NamedSharding(mesh, P()), "k": NamedSharding(mesh, P("fsdp")), "own": None, "n": None}
    restored = saved.restore(abstract(rank_state(0)), {**spread, "step": None, "name": None})
    assert restored["k"].sharding == NamedSharding(mesh, P("fsdp"))


def test_without_a_template_a_rank_sees_all_of_every_rank(mesh):
    saved = split([rank_state(r) for r in range(3)], LOCAL)
    restored = saved.restore(None, rank=1)
    assert restored["w"].tolist() == np.arange(24).reshape(6, 4).tolist()
    assert restored["k"].shape == (6, 2)


# --- anything at all


AXES = ("a", "b")


@st.composite
def placements(draw, ndim):
    """A mesh of 1 to 4 devices in any order, and a spec that needs no divisibility beyond 4."""
    shape = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]))
    devices = draw(st.permutations(range(4)))[: math.prod(shape)]
    spec: list[Any] = [None] * ndim
    for axis in draw(st.sets(st.sampled_from(AXES))) if ndim else ():
        where = draw(st.integers(0, ndim - 1))
        spec[where] = (*(spec[where] or ()), axis)
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]).reshape(shape), AXES)
    return NamedSharding(mesh, P(*spec))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_array_from_any_mesh_to_any_other(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 4, 8]), max_size=3), "shape"))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int4", "uint8", "complex64"]), "dtype")
    source, target = (data.draw(placements(len(shape)), side) for side in ("from", "to"))
    x = random_bits(shape, dtype)
    saved = save({"x": jax.device_put(x, source)})
    template = {"x": jax.ShapeDtypeStruct(shape, x.dtype, sharding=target)}
    restored = saved.restore(template)["x"]
    assert restored.sharding == target
    assert bits(restored) == bits(x)
