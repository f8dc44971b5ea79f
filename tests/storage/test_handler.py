"""The handler: any target saved and restored, steps kept and pruned, errors where they belong."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.fs as pafs
import pytest
from flax import nnx
from servers import make_bucket, s3, s3_server
from sinks import Sink, failing
from states import STATES, abstract, facts, sharded
from test_conformance import load_with_orbax

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import (
    ConfigError,
    DataStateError,
    IntegrityError,
    PersistError,
    StepError,
    UnsupportedLeafError,
)
from ray_jax_ckpt.storage.manifest import MANIFEST
from ray_jax_ckpt.storage.retention import surplus

STATE = {"w": jnp.arange(4.0), "name": "x"}


@pytest.fixture
def handler():
    with rjc.OrbaxCheckpointHandler() as one:
        yield one


@pytest.fixture
def in_background():
    with rjc.OrbaxCheckpointHandler(async_checkpointing=True) as one:
        yield one


def same(found: Any, wanted: Any) -> bool:
    return facts(found, exact=True) == facts(wanted, exact=True)


# Targets.


@pytest.mark.parametrize("name", ["training", "plain", "named", "dtypes", "unknown", "bare", "bare_int", "nothing"])
def test_a_pytree_comes_back(handler, tmp_path, name):
    state = STATES[name]()
    handler.save(tmp_path, state, step=3)
    restored = handler.restore(tmp_path, state)
    assert same(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert not isinstance(wanted, jax.Array) or leaf.sharding == wanted.sharding
    if name not in ("plain",):
        assert same(handler.restore(tmp_path, abstract(state)), state)


def test_without_a_target_keys_are_keys_and_strings_strings(handler, tmp_path):
    state = {
        "key": jax.random.key(3),
        "keys": [jax.random.split(jax.random.key(1, impl="rbg"), 2)],
        "s": "é",
        "n": None,
    }
    state |= {"w": sharded(jnp.arange(8.0), "a"), "np": np.ones(2), "t": (1, 2.5, True), "e": {}}
    handler.save(tmp_path, state)
    assert same(handler.restore(tmp_path), state)


def test_what_is_restored_can_be_donated(handler, tmp_path):
    handler.save(tmp_path, STATE)
    for restored in (handler.restore(tmp_path), handler.restore(tmp_path, STATE)):
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        assert step(restored["w"]).tolist() == [1, 2, 3, 4]
        assert restored["w"].is_deleted()


class Model(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed, dropout=jax.random.key(seed))
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.dropout(self.norm(layer(x)))
        return x


def test_a_whole_model_comes_back_in_place(handler, tmp_path):
    x = jnp.arange(12.0).reshape(4, 3)
    model, other = Model(0), Model(1)
    model(x)  # statistics and counts of the generators move on
    handler.save(tmp_path, model, step=1)
    assert handler.restore(tmp_path, other) is other
    assert same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(model)))
    assert model(x).tolist() == other(x).tolist()


def test_a_model_with_its_optimizer_comes_back(handler, tmp_path):
    def make(seed: int):
        model = Model(seed)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), "epoch": seed}

    def grow(made):
        def loss(model):
            return model(jnp.ones((4, 3))).sum()

        with jax.numpy_dtype_promotion("standard"):  # optax asks for it
            made["optimizer"].update(made["model"], nnx.grad(loss)(made["model"]))

    one, other = make(0), make(1)
    grow(one)
    handler.save(tmp_path, one)
    restored = handler.restore(tmp_path, other)
    assert restored["model"] is other["model"]
    assert restored["epoch"] == 0
    grow(one)
    grow(other)
    for part in ("model", "optimizer"):
        assert same(nnx.to_pure_dict(nnx.state(other[part])), nnx.to_pure_dict(nnx.state(one[part])))


def test_the_state_of_an_optimizer_comes_back(handler, tmp_path):
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    with jax.numpy_dtype_promotion("standard"):  # optax asks for it
        state = optimizer.update(STATE["w"], optimizer.init(STATE["w"]), STATE["w"])[1]
    handler.save(tmp_path, state)
    assert same(handler.restore(tmp_path, optimizer.init(STATE["w"])), state)


class Iterator:
    def __init__(self, position: int) -> None:
        self.position, self.key = position, jax.random.key(position)

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position, "key": self.key, "name": "it"}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position, self.key = state["position"], state["key"]


def test_an_object_with_a_state_comes_back_in_place(handler, tmp_path):
    handler.save(tmp_path, Iterator(5))
    other = Iterator(0)
    assert handler.restore(tmp_path, other) is other
    assert (other.position, jax.random.key_data(other.key).tolist()) == (5, [0, 5])
    assert handler.restore(tmp_path)["position"] == 5


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    weights: dict[str, Any]
    iterator: Iterator
    doubled: int = dataclasses.field(init=False, default=2)


def test_a_dataclass_and_what_is_in_it_comes_back(handler, tmp_path):
    handler.save(tmp_path, [Run("a", {"w": jnp.ones(2)}, Iterator(3))])
    target = [Run("b", {"w": jnp.zeros(2)}, Iterator(0))]
    [restored] = handler.restore(tmp_path, target)
    assert (type(restored), restored.name, restored.weights["w"].tolist()) == (Run, "a", [1, 1])
    assert restored.iterator is target[0].iterator
    assert restored.iterator.position == 3


def test_a_target_on_another_mesh_gets_its_own_sharding(handler, tmp_path):
    state = {"w": sharded(jnp.arange(64.0).reshape(8, 8), "a", "b")}
    handler.save(tmp_path, state)
    restored = handler.restore(tmp_path, abstract(state, 1, 4))
    assert restored["w"].sharding.mesh.devices.shape == (1, 4)
    assert restored["w"].tolist() == state["w"].tolist()


def test_what_cannot_be_saved_is_named_and_leaves_nothing(handler, tmp_path):
    with pytest.raises(UnsupportedLeafError, match=r"\['f'\]"):
        handler.save(tmp_path, {"f": lambda: 1})
    with pytest.raises(UnsupportedLeafError, match=r"would have the same directory 'a\.b'"):
        handler.save(tmp_path, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(DataStateError, match=r"is a builtins\.object, which cannot be saved"):
        handler.save(tmp_path, STATE, metadata={"f": object()})
    assert os.listdir(tmp_path) == []


def test_a_target_that_does_not_fit_is_refused_with_the_path(handler, tmp_path):
    handler.save(tmp_path, STATE)
    with pytest.raises(ValueError, match=r"\['w'\]: the template wants float32\[5\], the snapshot has float32\[4\]"):
        handler.restore(tmp_path, {"w": jnp.zeros(5), "name": ""})


# Where it lies.


def test_paths_are_named_by_step(handler, tmp_path):
    assert handler.save(tmp_path, STATE) == str(tmp_path / "checkpoint")
    assert handler.save(str(tmp_path), STATE, step=7) == str(tmp_path / "ckpt-7")
    assert handler.save_to_directory(tmp_path, STATE, np.int64(8)) == str(tmp_path / "ckpt-8")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-8"]


def test_plain_orbax_loads_what_is_saved(handler, tmp_path):
    state = STATES["training"]()
    path = handler.save(tmp_path / "run", state, step=7, metadata={"note": "hi", "array": np.ones(2)})
    load_with_orbax([("training", Path(path))], tmp_path)
    restored = handler.checkpointer.restore(path, abstract(state))
    assert same(restored, state)


def test_very_many_leaves_come_back(handler, tmp_path):
    state = {f"x{i}": np.full(4, i, np.float32) for i in range(1500)}
    path = handler.save(tmp_path, state)
    assert sum(len(files) for *_, files in os.walk(path)) < 50
    assert same(handler.restore(tmp_path, state), state)


def test_s3_keeps_steps_too(handler):
    with s3_server() as port:
        make_bucket(port, "bucket")
        options = f"endpoint_override=http%3A%2F%2F127.0.0.1%3A{port}&region=us-east-1"
        uri = f"s3://key:secret@bucket/run?{options}"
        for step in (1, 2, 3):
            assert handler.save(uri, STATE, step=step, keep=2).endswith(f"bucket/run/ckpt-{step}?{options}")
        assert handler.get_checkpoint_steps(("bucket/run", s3(port))) == [2, 3]
        assert same(handler.restore(uri, STATE), STATE)


def test_a_store_without_directories_and_renaming_keeps_steps_too(handler):
    sink = Sink()
    for step in (1, 2, 3):
        assert handler.save(("b/run", sink.filesystem()), STATE, step=step, keep=2) == f"b/run/ckpt-{step}"
    assert handler.get_checkpoint_steps(("b/run", sink.filesystem())) == [2, 3]
    assert same(handler.restore(("b/run", sink.filesystem())), STATE)


# Metadata.


@pytest.mark.parametrize(
    "metadata", [{"a": 1, "b": [1, (2.5, None)], 3: {"x": float("inf")}, "raw": b"\0"}, {}, None], ids=str
)
def test_metadata_comes_back_exactly(handler, tmp_path, metadata):
    handler.save(tmp_path, STATE, metadata=metadata)
    assert handler.restore(tmp_path, metadata_only=True) == metadata


def test_metadata_may_hold_arrays(handler, tmp_path):
    handler.save(tmp_path, STATE, metadata={"loss": jnp.float32(0.5), "hist": np.arange(3)})
    found = handler.restore(tmp_path, metadata_only=True)
    assert (float(found["loss"]), found["hist"].tolist()) == (0.5, [0, 1, 2])


# Steps.


def test_the_newest_step_is_restored_unless_one_is_named(handler, tmp_path):
    for step in (9, 10, 2):
        handler.save(tmp_path, {"step": step}, step=step, keep=None)
    assert handler.restore(tmp_path) == {"step": 10}
    assert handler.restore(tmp_path, step=2) == {"step": 2}
    assert handler.get_checkpoint_steps(tmp_path) == [2, 9, 10]
    assert handler.latest_step(tmp_path) == 10
    assert handler.list_checkpoints(tmp_path) == {step: str(tmp_path / f"ckpt-{step}") for step in (2, 9, 10)}
    with pytest.raises(ValueError, match=r"no checkpoint of step 5 in .*: it has steps 2, 9, 10"):
        handler.restore(tmp_path, step=5)


@pytest.mark.parametrize(
    ("steps", "just_written", "keep", "removed"),
    [
        ({1, 2, 3}, 3, 1, [1, 2]),
        ({1, 2, 3}, 3, 2, [1]),
        ({1, 2, 3}, 3, 3, []),
        ({1, 2, 3}, 3, None, []),
        ({1, 2, 10}, 1, 1, [2, 10]),
        ({1, 2, 10}, 1, 2, [2]),
        ({4}, 4, 1, []),
    ],
)
def test_the_lowest_steps_go_and_never_the_one_just_written(steps, just_written, keep, removed):
    assert surplus(steps, just_written=just_written, keep=keep) == removed


def test_steps_are_pruned_when_the_new_one_is_complete(handler, tmp_path, monkeypatch):
    for step in (1, 2, 3):
        handler.save(tmp_path, STATE, step=step, keep=2)
    assert handler.get_checkpoint_steps(tmp_path) == [2, 3]
    (tmp_path / "4").mkdir()
    (tmp_path / "ckpt-note").mkdir()
    handler.save(tmp_path, STATE, step=5)
    assert sorted(os.listdir(tmp_path)) == ["4", "ckpt-5", "ckpt-note"]


def test_a_failed_save_prunes_nothing_and_leaves_nothing(handler):
    sink = Sink()
    place = ("b", sink.filesystem())
    handler.save(place, STATE, step=1)
    sink.on_write = failing(10**9, lambda: PermissionError("denied"), "ckpt-2/w/c")
    with pytest.raises(PersistError, match="denied"):
        handler.save(place, STATE, step=2)
    assert {key.split("/")[1] for key in sink.objects} == {"ckpt-1"}
    assert handler.get_checkpoint_steps(place) == [1]


def test_what_a_killed_save_left_is_not_listed_not_restored_and_cleared_away(handler, tmp_path, caplog):
    sink = Sink()
    for place, remove in (
        ((str(tmp_path), pafs.LocalFileSystem()), lambda: os.remove(tmp_path / "ckpt-2" / MANIFEST)),
        (("b", sink.filesystem()), lambda: sink.objects.pop(f"b/ckpt-2/{MANIFEST}")),
    ):
        handler.save(place, {"step": 1}, step=1, keep=None)
        handler.save(place, {"step": 2}, step=2, keep=None)
        remove()
        assert handler.get_checkpoint_steps(place) == [1]
        with caplog.at_level(logging.WARNING):
            assert handler.restore(place) == {"step": 1}
        assert "passed over" in caplog.text
        handler.save(place, {"step": 3}, step=3, keep=None)
        assert handler.get_checkpoint_steps(place) == [1, 3]
        names = {info.base_name for info in place[1].get_file_info(pafs.FileSelector(place[0]))}
        assert names == {"ckpt-1", "ckpt-3"}


def test_a_damaged_step_is_passed_over_unless_it_is_named(handler, tmp_path):
    handler.save(tmp_path, STATE, step=1, keep=None)
    handler.save(tmp_path, STATE, step=2, keep=None)
    content = bytearray((tmp_path / "ckpt-2" / "w" / "c" / "0").read_bytes())
    content[3] ^= 1
    (tmp_path / "ckpt-2" / "w" / "c" / "0").write_bytes(content)
    assert same(handler.restore(tmp_path, STATE), STATE)
    with pytest.raises(IntegrityError):
        handler.restore(tmp_path, STATE, step=2)


# Errors.


def test_a_checkpoint_that_is_there_is_only_overwritten_when_asked(handler, tmp_path):
    sink = Sink()
    for place in (tmp_path, ("b", sink.filesystem())):
        handler.save(place, {"old": jnp.ones(3)})
        with pytest.raises(FileExistsError, match="checkpoint is there already"):
            handler.save(place, {"new": 1})
        assert list(handler.restore(place)) == ["old"]
        handler.save(place, {"new": 1}, overwrite=True)
        assert handler.restore(place) == {"new": 1}
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert not any("old" in key for key in sink.objects)


def test_a_failed_overwrite_on_a_disk_leaves_the_old_one(handler, tmp_path, monkeypatch):
    handler.save(tmp_path, {"old": 1})
    with monkeypatch.context() as patch:
        patch.setattr("ray_jax_ckpt.storage.writer.open_output", failing(10**9, lambda: PermissionError("denied")))
        with pytest.raises(PersistError, match="could not be written"):
            handler.save(tmp_path, {"new": 1}, overwrite=True)
    assert handler.restore(tmp_path) == {"old": 1}
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_directory_that_is_not_there_or_empty_is_named(handler, tmp_path):
    with pytest.raises(ValueError, match=r"no directory .*nowhere"):
        handler.restore(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at "):
        handler.restore(tmp_path)
    assert handler.get_checkpoint_steps(tmp_path / "nowhere") == []
    assert handler.latest_step(tmp_path) is None
    assert handler.list_checkpoints(tmp_path) == {}


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_what_is_no_step_is_refused(handler, tmp_path, step):
    with pytest.raises(StepError, match="an int of 0 or more"):
        handler.save(tmp_path, STATE, step=step)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_what_is_no_number_to_keep_is_refused(handler, tmp_path, keep):
    with pytest.raises(ConfigError, match="keep="):
        handler.save(tmp_path, STATE, step=1, keep=keep)


# In the background.


def test_in_the_background_the_state_at_the_call_is_saved(in_background):
    sink, go = Sink(), threading.Event()
    sink.on_open = lambda path: go.wait(30) and None
    host = np.arange(3)
    state = {"w": jnp.arange(4.0), "host": host}
    assert in_background.save(("b", sink.filesystem()), state, step=1) == "b/ckpt-1"
    assert in_background.async_checkpointing
    host[:] = -1
    state["w"].delete()
    assert not sink.objects
    go.set()
    in_background.wait_until_finished()
    assert same(in_background.restore(("b", sink.filesystem())), {"w": jnp.arange(4.0), "host": np.arange(3)})


def test_in_the_background_calls_wait_for_what_is_being_written(in_background, tmp_path):
    for step in range(4):
        in_background.save(tmp_path, {"step": step}, step=step, keep=2)
    assert in_background.get_checkpoint_steps(tmp_path) == [2, 3]
    assert in_background.restore(tmp_path) == {"step": 3}


@pytest.mark.parametrize("call", ["wait_until_finished", "close", "save", "restore"])
def test_what_fails_in_the_background_is_raised_by_the_next_call_once(call):
    sink = Sink()
    place = ("b", sink.filesystem())
    handler = rjc.OrbaxCheckpointHandler(async_checkpointing=True)
    handler.save(place, STATE)
    handler.save(place, STATE)
    arguments = {"save": (place, STATE, 5), "restore": (place,)}.get(call, ())
    with pytest.raises(FileExistsError, match="b/checkpoint is there already"):
        getattr(handler, call)(*arguments)
    handler.wait_until_finished()
    assert same(handler.restore(place), STATE)
    handler.close()
    handler.close()


def test_leaving_the_block_waits(tmp_path):
    before = threading.active_count()
    with rjc.OrbaxCheckpointHandler(async_checkpointing=True) as handler:
        handler.save(tmp_path, STATE)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert threading.active_count() <= before + 4
