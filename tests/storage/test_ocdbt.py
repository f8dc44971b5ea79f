"""Very many leaves: one database, few objects, little memory, and plain Orbax reads it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from sinks import Sink, failing, files_below
from states import STATES
from test_conformance import load_with_orbax
from written import hold, hold_group, write

from ray_jax_ckpt.errors import IntegrityError, PersistError
from ray_jax_ckpt.storage import ocdbt, writer
from ray_jax_ckpt.storage.manifest import MANIFEST
from ray_jax_ckpt.storage.plan import needs_database
from ray_jax_ckpt.storage.writer import Effort

MANY = {f"x{i}": np.full(4, i, np.float32) for i in range(2500)}


def entries(path) -> dict[str, bytes]:
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    return {key.decode(): database[key] for key in database.list().result()}


def read_array(path, name):
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}}
    return ts.open(spec).result().read().result()


def test_many_leaves_need_a_database_and_few_do_not():
    assert needs_database(hold(MANY).indices)
    assert not needs_database(hold({"w": jnp.ones(3), "lr": 0.1}).indices)


def test_many_leaves_take_few_objects_all_of_them_named(tmp_path):
    manifest = write(hold(MANY, ocdbt=True), tmp_path / "c")
    assert files_below(tmp_path / "c") == {*manifest.files, MANIFEST}
    assert len(manifest.files) < 50
    assert {leaf.form for leaf in manifest.leaves} == {"ocdbt"}
    np.testing.assert_array_equal(read_array(tmp_path / "c", "x2345"), MANY["x2345"])


def test_orbax_loads_what_is_written(tmp_path):
    directories = [(name, tmp_path / name) for name in STATES]
    for name, path in directories:
        write(hold(STATES[name](), ocdbt=True), path, custom={"note": "hi"})
    load_with_orbax(directories, tmp_path)


def test_what_is_done_leaves_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ocdbt, "_FILE_BYTES", 100_000)
    held_at_once = []
    take = ocdbt._Database.take_values

    def taken(database):
        held_at_once.append(sum(len(database._files[key]) for key in database._files.list().result()))
        return take(database)

    monkeypatch.setattr(ocdbt._Database, "take_values", taken)
    state = {f"x{i}": np.full(10_000, i, np.int8) for i in range(100)}
    manifest = write(hold(state, ocdbt=True), tmp_path / "c", effort=Effort(streams=1, timeout_s=60))
    assert len(held_at_once) >= 10
    assert max(held_at_once) < 200_000
    assert sum(path.startswith(ocdbt._VALUES) for path in manifest.files) >= 10
    for i in range(100):
        np.testing.assert_array_equal(read_array(tmp_path / "c", f"x{i}"), state[f"x{i}"])


def test_large_shards_are_cut_so_that_memory_stays_bounded(tmp_path, monkeypatch):
    for module in ("plan", "orbax_metadata"):
        monkeypatch.setattr(f"ray_jax_ckpt.storage.{module}.DATABASE_CHUNK_BYTES", 1000)
    state = {"w": jnp.arange(40 * 30).reshape(40, 30), "b": jnp.ones((7, 3))}
    manifest = write(hold(state, ocdbt=True), tmp_path / "c")
    assert [leaf.chunks for leaf in manifest.leaves] == [(7, 3), (8, 30)]
    np.testing.assert_array_equal(read_array(tmp_path / "c", "w"), np.asarray(state["w"]))


def test_the_databases_of_several_writers_become_one(tmp_path):
    state = {f"x{i}": jnp.full((4, 5), i) for i in range(20)} | {"n": np.arange(3)}
    manifest = write(hold_group([state] * 2, ocdbt=True), tmp_path / "c")
    assert files_below(tmp_path / "c") == {*manifest.files, MANIFEST}
    for name, array in state.items():
        np.testing.assert_array_equal(read_array(tmp_path / "c", name), np.asarray(array))
    assert len(entries(tmp_path / "c")) == 20 * 3 + 2


def test_a_writer_whose_share_is_missing_is_named(tmp_path, monkeypatch):
    real = ocdbt.write_database
    monkeypatch.setattr("written.write_database", lambda *given, writer: {} if writer else real(*given, writer=writer))
    with pytest.raises(PersistError, match=r"ocdbt.process_1, a writer's share of the arrays, cannot be read"):
        write(hold_group([{"x": jnp.ones((4, 5))}] * 2, ocdbt=True), tmp_path / "c")


def test_bytes_that_changed_in_memory_are_not_written_as_if_they_had_not(tmp_path):
    held = hold(MANY, ocdbt=True)
    for part in held.parts.values():
        part[64 * 7] ^= 1
    with pytest.raises(IntegrityError, match=r"x\d+/c/0: the bytes in memory are not those that were captured"):
        write(held, tmp_path / "c")


def test_a_store_that_fails_now_and_then_gets_the_database(monkeypatch):
    monkeypatch.setattr(writer, "_FIRST_DELAY_S", 0.001)
    sink = Sink()
    sink.on_write = failing(3, lambda: OSError("throttled"), "ocdbt")
    manifest = write(hold(MANY, ocdbt=True), "b/c", sink.filesystem())
    assert sink.below("b/c") == {*manifest.files, MANIFEST}
