"""Checkpoints that plain Orbax wrote, read without it."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import tensorstore as ts
from filesystems import ObjectStore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax_process import FORMS, mesh, state

from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError, NotSupportedError, RestoreError, TreeMismatchError
from ray_jax_ckpt.model.catalog import Catalog
from ray_jax_ckpt.model.recovery import Want
from ray_jax_ckpt.storage.restore import load, open_checkpoint
from ray_jax_ckpt.testing.equality import assert_identical as same


def abstract(tree):
    def spec(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(spec, tree)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_comes_back_in_its_structure_bit_for_bit(orbax_root, form):
    found = load(orbax_root / form, abstract(state()))
    same(found.state, state())
    assert (found.step, found.source, found.data_by_rank) == (None, "storage", {0: None})


@pytest.mark.parametrize("form", FORMS)
def test_a_filesystem_that_orbax_does_not_open_is_read_without_a_local_copy(orbax_root, form, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    objects = ObjectStore(orbax_root / form)
    same(load("bucket", abstract(state()), filesystem=pafs.PyFileSystem(objects)).state, state())
    assert not [thread for thread in threading.enumerate() if thread.name == "rjc-loopback"]


@pytest.mark.parametrize("form", FORMS)
def test_without_a_template_names_become_keys_and_positions(orbax_root, form):
    found = load(orbax_root / form).state
    assert found["name"] == "run-7"
    assert [found[name] for name in ("step", "rate", "flag", "none")] == [7, 0.5, True, None]
    assert [type(found[name]) for name in ("step", "rate", "flag")] == [int, float, bool]
    assert found["nothing"] == {"dict": {}, "list": [], "tuple": ()}
    assert found["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["rows"], state()["rows"])
    np.testing.assert_array_equal(found["opt"][0]["mu"]["x"], np.zeros(3))


def test_another_mesh_gets_its_own_shards(orbax_root):
    other = Mesh(np.array(jax.devices()[:3]), "x")
    wanted = {
        "rows": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh(), P(None, "fsdp"))),
        "columns": jax.ShapeDtypeStruct((3, 8), jnp.int32, sharding=NamedSharding(other, P("x"))),
    }
    found = load(orbax_root / "zarr3", wanted, partial=True).state
    for name, leaf in found.items():
        assert leaf.sharding == wanted[name].sharding
        np.testing.assert_array_equal(leaf, state()[name])


@pytest.mark.parametrize("form", FORMS)
def test_a_template_without_shardings_gathers_what_was_spread_with_a_warning(orbax_root, form):
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state().items() if name in ("rows", "half")}
    with pytest.warns(RuntimeWarning, match=r"1 leaves of 256 bytes, \['rows'\] first, .*one device.*shardings="):
        found = load(orbax_root / form, shapes, partial=True).state
    np.testing.assert_array_equal(found["rows"], state()["rows"])
    # No warning where the template, or the call, says where.
    load(orbax_root / form, shapes, partial=True, shardings=NamedSharding(mesh(), P()))


def test_only_the_chunks_that_are_needed_are_read(orbax_root):
    objects = ObjectStore(orbax_root / "big")
    with open_checkpoint((pafs.PyFileSystem(objects), "bucket")) as source:
        (index,) = source.indices(None)
        want = Want(((100, 110), (0, 1024)), Catalog.of([index]).shared(0), 4)
        (piece,) = source.fetch([want], [np.dtype(np.float32)])
    np.testing.assert_array_equal(piece, np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)[100:110])
    assert {key for key, *_ in objects.read if "/c/" in key} == {"bucket/w/c/0/0"}


def test_the_newest_step_of_a_manager_is_taken_and_a_step_can_be_chosen(orbax_root):
    found = load(orbax_root / "manager", {"w": jnp.zeros(2, jnp.int32)})
    assert (found.step, found.state["w"].tolist()) == (10, [10, 10])
    assert load(orbax_root / "manager" / "3", {"w": jnp.zeros(2, jnp.int32)}).step == 3


def test_a_step_that_is_not_whole_is_passed_over_with_a_warning(orbax_root, tmp_path, caplog):
    shutil.copytree(orbax_root / "manager", tmp_path / "m")
    (tmp_path / "m" / "12" / "default").mkdir(parents=True)
    shutil.copytree(tmp_path / "m" / "10", tmp_path / "m" / "11")
    shutil.rmtree(tmp_path / "m" / "11" / "default" / "d")
    # Markers that a copy to another filesystem loses.
    for marker in tmp_path.rglob("commit_success.txt"):
        marker.unlink()
    found = load(tmp_path / "m", {"w": jnp.zeros(2, jnp.int32)})
    assert found.step == 10
    assert sum("passed over" in record.message for record in caplog.records) == 2


def test_a_single_array_is_a_state(orbax_root):
    assert load(orbax_root / "alone", jnp.zeros(3, jnp.int32)).state.tolist() == [0, 1, 2]


def test_several_trees_without_a_usual_name_are_named(orbax_root):
    with pytest.raises(NoCheckpointError, match="several trees: one, two"):
        load(orbax_root / "several")
    assert load(orbax_root / "several" / "two").state["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s | {"more": jnp.zeros(1)}, r"\['more'\].*no such leaf"),
        (lambda s: {k: v for k, v in s.items() if k != "half"}, r"\['half'\].*partial=True"),
        (lambda s: s | {"half": jnp.zeros(4, jnp.bfloat16)}, r"\['half'\].*bfloat16\[4\].*bfloat16\[3\]"),
        (lambda s: s | {"half": jnp.zeros(3, jnp.float32)}, r"\['half'\].*cast=True"),
        (lambda s: s | {"step": 7.0}, r"\['step'\].*float.*int"),
        (lambda s: s | {"name": 3}, r"\['name'\].*int.*str"),
        (lambda s: s | {"key": jax.random.key(3, impl="rbg")}, r"\['key'\].*rbg.*threefry"),
    ],
)
def test_a_template_that_differs_is_refused_with_both_sides(orbax_root, change, words):
    with pytest.raises(TreeMismatchError, match=words):
        load(orbax_root / "v1", change(state()))


def test_a_number_comes_back_as_what_is_asked_for(orbax_root):
    template = {"step": np.int64(0), "zero_d": 0.0, "rate": np.zeros(())}
    found = load(orbax_root / "zarr2", template, partial=True).state
    assert (found["step"], type(found["step"])) == (7, np.int64)
    assert (found["zero_d"], type(found["zero_d"])) == (2.5, float)
    assert (found["rate"].shape, found["rate"].dtype) == ((), np.float64)


def test_arrays_are_cast_when_asked_for(orbax_root):
    found = load(orbax_root / "v1", {"half": jnp.zeros(3, jnp.float32)}, partial=True, cast=True).state["half"]
    assert (found.dtype, found.tolist()) == (jnp.float32, [1.5] * 3)


# Damage and bad intentions.


@pytest.fixture
def copy(orbax_root, tmp_path):
    """Makes a copy of a checkpoint, to be changed."""

    def make(form: str) -> Path:
        return Path(shutil.copytree(orbax_root / form, tmp_path / form))

    return make


def edit(path: Path, change) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(("form", "chunk"), [("zarr2", "rows/2.0"), ("zarr3", "rows/c/2/0")])
def test_a_missing_chunk_is_an_error_and_not_zeros(copy, form, chunk):
    root = copy(form)
    (root / chunk).unlink()
    with pytest.raises(IntegrityError, match="'rows'"):
        load(root, state())


@pytest.mark.parametrize("form", ["zarr3", "ocdbt"])
def test_damaged_bytes_are_an_error(copy, form):
    root = copy(form)
    file = root / "rows/c/1/0" if form == "zarr3" else next((root / "d").iterdir())
    raw = bytearray(file.read_bytes())
    raw[: len(raw) // 2] = bytes(len(raw) // 2)
    file.write_bytes(raw)
    with pytest.raises(RestoreError):
        load(root, state())


def test_an_array_that_has_gone_is_named(copy):
    root = copy("zarr3")
    shutil.rmtree(root / "numpy")
    with pytest.raises(IntegrityError, match="'numpy'"):
        load(root, state())


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_name_that_leads_out_of_the_directory_is_refused(copy, name):
    root = copy("zarr3")

    def rename(tree):
        entry = tree["tree_metadata"].pop("('half',)")
        entry["key_metadata"][0]["key"] = name
        tree["tree_metadata"]["x"] = entry

    edit(root / "_METADATA", rename)
    with pytest.raises(IntegrityError, match="cannot be that of an array"):
        load(root)


def test_a_link_that_leads_out_of_the_directory_is_refused(copy, tmp_path):
    root = copy("zarr3")
    (tmp_path / "secret").write_bytes(bytes(64))
    (root / "rows/c/0/0").unlink()
    (root / "rows/c/0/0").symlink_to(tmp_path / "secret")
    with pytest.raises(IntegrityError, match="link"):
        load(root)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", '{"tree_metadata": [1]}', '{"tree_metadata": {"a": {"key_metadata": 3}}}', "7", "\xff"]
)
def test_metadata_that_are_none_are_refused(copy, text):
    root = copy("zarr3")
    (root / "_METADATA").write_text(text, encoding="latin-1")
    with pytest.raises(IntegrityError, match="damaged"):
        load(root)


@pytest.mark.parametrize(
    ("shape", "chunk", "words"),
    [
        ([1 << 40], [2], "can take"),
        ([4], [1 << 40], "claims that its chunks"),
        ([-4], [2], "cannot be read"),
        ([1 << 70], [2], "cannot be read"),
    ],
)
def test_shapes_that_cannot_be_are_refused_before_they_take_memory(copy, shape, chunk, words):
    root = copy("zarr2")

    def claim(tree):
        tree["shape"], tree["chunks"] = shape, chunk

    edit(root / "half/.zarray", claim)
    with pytest.raises(RestoreError, match=words):
        load(root)


def test_a_compression_whose_chunks_decode_to_anything_is_refused(copy):
    root = copy("zarr2")
    edit(
        root / "half/.zarray", lambda t: t.update(compressor={"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1})
    )
    with pytest.raises(NotSupportedError, match=r"'half'.*blosc"):
        load(root)


def test_leaves_of_types_that_only_their_writer_knows_are_named(copy):
    root = copy("zarr3")
    edit(root / "_METADATA", lambda t: t["tree_metadata"]["('half',)"]["value_metadata"].update(value_type="mine"))
    with pytest.raises(NotSupportedError, match=r"half \(mine\)"):
        load(root)


def test_a_directory_that_is_none_says_what_was_looked_for(tmp_path):
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NoCheckpointError, match=r"no checkpoint at .*manifest.json.*_METADATA.*ckpt-7"):
            load(where)
    with pytest.raises(ValueError, match="no checkpoint"):
        load(tmp_path)


def test_an_unfinished_write_of_orbax_is_none(copy, tmp_path):
    root = copy("zarr3")
    unfinished = root.rename(tmp_path / "5.orbax-checkpoint-tmp-1")
    with pytest.raises(NoCheckpointError):
        load(unfinished)
    with pytest.raises(NoCheckpointError):
        load(tmp_path)


DEEP = "[" * 1_000_000 + "]" * 1_000_000


def deepen(text: str, name: str) -> str:
    tree = json.loads(text)
    tree[name] = "here"
    return json.dumps(tree).replace('"here"', DEEP)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(
    ("form", "file", "name"), [("zarr2", "half/.zarray", "x"), ("zarr3", "half/zarr.json", "codecs")]
)
def test_a_description_of_an_array_that_is_nested_deeply_is_refused(copy, form, file, name, served):
    # Else tensorstore ends the process.
    root = copy(form)
    (root / file).write_text(deepen((root / file).read_text(), name))
    with pytest.raises(IntegrityError, match="damaged: RecursionError"):
        load_from(root, served)


@pytest.mark.parametrize("served", [False, True])
def test_an_entry_of_a_database_that_is_nested_deeply_is_refused(copy, served):
    root = copy("ocdbt")
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
    database = ts.KvStore.open(kvstore).result()
    (key,) = [key for key in database.list().result() if key.startswith(b"half/") and b"zarr" in key]
    database.write(key, deepen(database.read(key).result().value.decode(), "x").encode()).result()
    with pytest.raises(IntegrityError, match="damaged: RecursionError"):
        load_from(root, served)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(
    ("form", "file"), [("zarr2", "half/.zarray"), ("zarr3", "half/zarr.json"), ("ocdbt", "manifest.ocdbt")]
)
def test_a_description_of_any_size_is_not_read(copy, form, file, served, monkeypatch):
    monkeypatch.setattr("ray_jax_ckpt.storage.described.MAX_BYTES", 20_000)
    root = copy(form)
    with (root / file).open("r+b") as stream:
        stream.truncate(20_001)
    with pytest.raises(IntegrityError, match="has 20001 bytes, and 20000 are read at most"):
        load_from(root, served)


def load_from(root: Path, served: bool):
    return load("bucket", filesystem=pafs.PyFileSystem(ObjectStore(root))) if served else load(root)


@pytest.mark.parametrize(
    ("form", "name", "codec"),
    [
        ("zarr3", "zarr.json", "zstd"),
        ("zarr3", "zarr.json", "gzip"),
        ("zarr2", ".zarray", "zstd"),
        ("zarr2", ".zarray", "zlib"),
    ],
)
def test_a_chunk_that_decodes_to_more_than_it_may_is_given_up(copy, form, name, codec):
    root, num_bytes = copy(form), 64 << 20
    bomb = (
        zlib.compress(bytes(num_bytes)) if codec == "zlib" else pa.Codec(codec).compress(bytes(num_bytes), asbytes=True)
    )
    chunk = root / "half" / ("c/0" if form == "zarr3" else "0")
    assert chunk.exists()
    chunk.write_bytes(bomb)
    last = {"name": codec, "configuration": {"level": 1}}
    compressed = {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, last]}
    edit(
        root / "half" / name,
        lambda tree: tree.update(compressed if form == "zarr3" else {"compressor": {"id": codec, "level": 1}}),
    )
    before = peak_bytes()
    with pytest.raises(IntegrityError, match="End of data expected"):
        load(root)
    assert peak_bytes() - before < num_bytes // 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("name", ["_METADATA", "rows"])
def test_any_link_that_leads_out_is_refused_before_anything_is_read(copy, tmp_path, name):
    root = copy("zarr3")
    (root / name).rename(tmp_path / "outside")
    (root / name).symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match="outside of the checkpoint"):
        load(root)
