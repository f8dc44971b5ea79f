"""Checkpoints that this package wrote, brought back from storage."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.fs as pafs
import pytest
from filesystems import ObjectStore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from states import STATES, abstract, sharded, training
from written import hold, hold_group, write

from ray_jax_ckpt import OrbaxCheckpointHandler
from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import (
    CheckpointError,
    IntegrityError,
    NoCheckpointError,
    NotSupportedError,
    RestoreError,
    TreeMismatchError,
)
from ray_jax_ckpt.storage.manifest import MANIFEST, rank_file
from ray_jax_ckpt.storage.reader import lacking, read_manifest, verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing.equality import assert_identical

LOCAL = pafs.LocalFileSystem()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A checkpoint of `training()`. Not to be changed."""
    path = tmp_path_factory.mktemp("trained") / "c"
    write(hold(training()), path)
    return path


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


# What comes back.


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_bit_for_bit(tmp_path, name):
    state = STATES[name]()
    write(hold(state), tmp_path / "c")
    assert_identical(load(tmp_path / "c", state).state, state)
    verify(LOCAL, str(tmp_path / "c"))


@pytest.mark.parametrize("name", ["plain", "unknown", "bare", "nothing"])
def test_without_a_template_plain_trees_come_back_as_they_were(tmp_path, name):
    state = STATES[name]()
    write(hold(state), tmp_path / "c")
    assert_identical(load(tmp_path / "c").state, jax.tree.map(_host, state))


def _host(x):
    return np.asarray(x) if isinstance(x, jax.Array) else x


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (2, 1)])
def test_a_state_comes_back_on_another_mesh(trained, shape):
    wanted = abstract(training(), *shape)
    found = load(trained, wanted).state
    assert_identical(found, training(), placement=False)
    assert [x.sharding for x in jax.tree.leaves(found) if isinstance(x, jax.Array)] == [
        x.sharding for x in jax.tree.leaves(wanted) if hasattr(x, "sharding")
    ]


def test_what_a_checkpoint_says_of_itself_comes_back(tmp_path):
    data = [{"value": {"position": rank, "order": {"$": "bytes", "v": 0}}} for rank in range(3)]
    held = hold_group([{"w": jnp.arange(6)}] * 3, data=data, blobs=[bytes([rank]) * 5000 for rank in range(3)])
    write(held, tmp_path / "c")
    found = load(tmp_path / "c", {"w": jnp.zeros(6, jnp.int32)})
    assert found.data_by_rank == {r: {"position": r, "order": bytes([r]) * 5000} for r in range(3)}
    assert found.metrics == {rank: {"loss": rank / 2} for rank in range(3)}
    assert (found.step, found.source, found.path) == (7, "storage", str(tmp_path / "c"))


def test_each_rank_gets_what_was_its_own(tmp_path):
    states = [{"w": jnp.arange(6), "same": np.arange(4), "mine": np.full(3, r), "lr": float(r)} for r in range(3)]
    write(hold_group(states), tmp_path / "c")
    template = {"same": np.zeros(4, np.int64), "mine": np.zeros(3, np.int64), "lr": 0.0}
    for rank in range(3):
        found = load(tmp_path / "c", template, rank=rank, world_size=3, partial=True).state
        assert (found["mine"].tolist(), found["lr"]) == ([rank] * 3, float(rank))
        assert found["same"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TreeMismatchError, match=r"\['lr'\].*\['mine'\].*group of 3"):
        load(tmp_path / "c", template, rank=0, world_size=2, partial=True)
    alone = load(tmp_path / "c", {"w": jnp.zeros(6, jnp.int32), "same": template["same"]}, partial=True).state
    assert (alone["w"].tolist(), alone["same"].tolist()) == ([*range(6)], [*range(4)])


def test_a_rank_reads_what_is_its_own_and_of_others_what_is_asked_for(tmp_path):
    blobs = [bytes([r]) * 5000 for r in range(6)]
    data = [{"value": {"$": "bytes", "v": 0}}] * 6
    states = [{"w": jnp.arange(12), "mine": np.full(3, r)} for r in range(6)]
    write(hold_group(states, data=data, blobs=blobs), tmp_path / "c")
    objects = ObjectStore(tmp_path / "c")

    def read_of_ranks() -> list[str]:
        names = [key.rpartition("/")[2] for key, *_ in objects.read if "/rank_" in key]
        objects.read.clear()
        return sorted(set(names))

    template = {"w": jnp.zeros(12, jnp.int32), "mine": np.zeros(3, np.int64)}
    shardings = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0]), "mine": None}
    files = pafs.PyFileSystem(objects)
    found = load("bucket", template, rank=4, world_size=6, shardings=shardings, filesystem=files)
    assert found.state["mine"].tolist() == [4] * 3
    assert read_of_ranks() == ["rank_4.bin", "rank_4.json"]
    assert (len(found.data_by_rank), read_of_ranks()) == (6, [])
    assert found.data_by_rank[4] == blobs[4]
    assert read_of_ranks() == ["rank_4.bin"]
    assert found.data_by_rank[2] == blobs[2]
    assert read_of_ranks() == ["rank_2.bin", "rank_2.json"]
    assert 6 not in found.data_by_rank
    assert pickle.loads(pickle.dumps(found.data_by_rank)) == found.data_by_rank == dict(enumerate(blobs))
    assert read_of_ranks() == sorted(f"rank_{r}.{kind}" for r in (0, 1, 3, 5) for kind in ("bin", "json"))
    # What each rank had of its own is compared where others are to share it out, and only then.
    load("bucket", {"w": template["w"]}, partial=True, world_size=2, shardings=shardings["w"], filesystem=files)
    assert read_of_ranks() == ["rank_0.json"]
    with pytest.raises(TreeMismatchError, match=r"rank 1's differs"):
        load("bucket", template, world_size=2, shardings=shardings, filesystem=files)
    assert len(read_of_ranks()) == 6


def test_data_of_a_checkpoint_that_has_gone_since_is_an_error(tmp_path):
    data = [{"value": r} for r in range(2)]
    write(hold_group([{"w": jnp.zeros(2)}] * 2, data=data), tmp_path / "c")
    found = load(tmp_path / "c", {"w": jnp.zeros(2)}, rank=1, world_size=1)
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(NoCheckpointError):
        found.data_by_rank[0]


def test_leaves_are_left_out_and_cast_only_when_asked_for(trained):
    template = {"params": {"w": jnp.zeros((8, 8), jnp.bfloat16)}}
    for options in [{}, {"partial": True}, {"cast": True}]:
        with pytest.raises(TreeMismatchError):
            load(trained, template, **options)
    found = load(trained, template, partial=True, cast=True).state["params"]["w"]
    np.testing.assert_array_equal(found, np.arange(64).reshape(8, 8).astype(jnp.bfloat16))


def test_the_newest_whole_step_below_a_directory_is_taken(tmp_path, caplog):
    for step in (3, 20, 100):
        write(hold({"w": jnp.full(2, step)}), tmp_path / f"ckpt-{step}", step=step)
    (tmp_path / "ckpt-100" / MANIFEST).unlink()
    found = load(tmp_path, {"w": jnp.zeros(2, jnp.int32)})
    assert (found.step, found.state["w"].tolist()) == (20, [20, 20])
    assert "ckpt-100" in caplog.text


# A database of arrays.


@pytest.mark.parametrize("name", STATES)
def test_a_state_in_a_database_comes_back_bit_for_bit(tmp_path, name):
    state = STATES[name]()
    write(hold(state, ocdbt=True), tmp_path / "c")
    assert_identical(load(tmp_path / "c", state).state, state)


def test_damage_of_a_database_is_noticed(tmp_path):
    state = {"w": jnp.arange(6.0)}
    manifest = write(hold(state, ocdbt=True), tmp_path / "c")
    for name in [name for name in manifest.files if "manifest.ocdbt" in name or "/d/" in f"/{name}"]:
        raw = (tmp_path / "c" / name).read_bytes()
        (tmp_path / "c" / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(IntegrityError, match=f"{name} is damaged|{name}.* is damaged"):
            load(tmp_path / "c", state)
        (tmp_path / "c" / name).write_bytes(raw)
    assert_identical(load(tmp_path / "c", state).state, state)


# What is read.


@pytest.fixture
def objects(trained) -> ObjectStore:
    return ObjectStore(trained)


def test_any_filesystem_will_do(objects):
    state = training()
    assert_identical(load("bucket", state, filesystem=pafs.PyFileSystem(objects)).state, state)


def test_a_process_reads_only_the_chunks_that_it_needs(tmp_path):
    rows = NamedSharding(Mesh(np.array(jax.devices()[:4]), "x"), P("x"))
    write(hold({"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), rows), "v": jnp.ones(4)}), tmp_path / "c")
    objects = ObjectStore(tmp_path / "c")
    load("bucket", {"v": jnp.zeros(4)}, partial=True, filesystem=pafs.PyFileSystem(objects))
    assert {key for key, *_ in objects.read if "/c/" in key} == {"bucket/v/c/0"}


def test_no_byte_is_read_twice_for_several_devices(tmp_path):
    state = {"w": sharded(jnp.arange(64.0).reshape(8, 8), "a", "b")}
    write(hold(state), tmp_path / "c")
    objects = ObjectStore(tmp_path / "c")
    wanted = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(Mesh(jax.devices(), "x"), P("x")))}
    found = load("bucket", wanted, filesystem=pafs.PyFileSystem(objects)).state["w"]
    np.testing.assert_array_equal(found, state["w"])
    assert sum(size for key, _, size in objects.read if "/w/c/" in key) == 64 * 4


# Damage.


def test_any_damaged_file_is_noticed(copy):
    manifest = read_manifest(LOCAL, str(copy))
    arrays = tuple(leaf.path("c") for leaf in manifest.leaves if leaf.form == "chunks")
    for name, record in manifest.files.items():
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(IntegrityError, match=rf"{name}.* is damaged: bytes 0 to {record.size}"):
            verify(LOCAL, str(copy))
        # What only Orbax reads does not matter to a restore.
        if name.startswith(arrays) or name == rank_file(0):
            with pytest.raises(IntegrityError, match=rf"{name} is damaged.*Restore another one"):
                load(copy, training())
        (copy / name).write_bytes(content)
    load(copy, training())


@pytest.mark.parametrize("name", ["params.w/c/0/0", "_METADATA", rank_file(0)])
def test_a_missing_file_is_noticed_before_anything_is_read(copy, name):
    (copy / name).unlink()
    with pytest.raises(IntegrityError, match=rf"not complete: {name} \(missing\)"):
        load(copy, training())
    assert lacking(LOCAL, str(copy), read_manifest(LOCAL, str(copy))) == [f"{name} (missing)"]


def test_a_short_file_is_noticed(copy):
    file = copy / "params.w/c/0/0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="63 bytes instead of 64"):
        load(copy, training())
    # A rank that leaves the listing to rank 0.
    with pytest.raises(IntegrityError, match="ends 1 bytes too early"):
        load(copy, abstract(training()), rank=1)


def test_files_that_are_not_named_do_not_count(copy):
    for name in ("params.w/c/9/9", "other/zarr.json", "ray_jax_ckpt/rank_1.json"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"rubbish")
    assert_identical(load(copy, training()).state, training())


@pytest.mark.parametrize("all_of_ours", [False, True])
def test_a_checkpoint_without_its_manifest_is_none_although_orbax_reads_it(copy, all_of_ours):
    if all_of_ours:
        shutil.rmtree(copy / "ray_jax_ckpt")
    else:
        (copy / MANIFEST).unlink()
    with pytest.raises(NoCheckpointError, match=rf"but not its {MANIFEST}.*nothing of it is restored.*v1\.load\(path"):
        load(copy, training())
    (copy / "_METADATA").unlink()
    if not all_of_ours:
        with pytest.raises(NoCheckpointError, match=r"another checkpoint\.$"):
            load(copy, training())


def edited(path: Path, change) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def forge(root: Path, rank_change) -> None:
    """Changes a rank's record, and the manifest so that its digest fits."""
    edited(root / rank_file(0), rank_change)
    raw = (root / rank_file(0)).read_bytes()

    def fit(tree):
        tree["files"][rank_file(0)] = {"size": len(raw), "digest": digest(raw)}

    edited(root / MANIFEST, fit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 1}, "that of rank 1"),
        ({"items": [{"leaf": 0, "box": [[0, 1]], "offset": 0, "size": 1 << 40, "digest": "x"}]}, "places bytes behind"),
        ({"blobs": [{"offset": 5, "size": 1, "digest": "x"}]}, "places bytes behind"),
        ({"blobs": [{"offset": -5, "size": 1, "digest": "x"}]}, "damaged, at blobs"),
        ({"items": [{"leaf": 99, "box": [], "offset": 0, "size": 0, "digest": "x"}]}, "not a rank's own"),
        ({"values": {"99": 1}}, "does not have"),
        ({"specs": {"0": {}}}, "not the description of a leaf"),
    ],
)
def test_a_forged_record_of_a_rank_is_refused(copy, change, words):
    forge(copy, lambda tree: tree.update(change))
    with pytest.raises(IntegrityError, match=words):
        load(copy, training())


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: t.update(format=2), NotSupportedError),
        (lambda t: t["leaves"][0]["spec"].update(shape=[1 << 50, 1 << 50]), RestoreError),
        (lambda t: t["leaves"][0].update(shape=[1 << 50], chunks=[1]), IntegrityError),
        (lambda t: t["leaves"][0].update(name="../../etc"), IntegrityError),
        (lambda t: t["files"].update({"../x": {"size": 1, "digest": "x"}}), IntegrityError),
        (lambda t: t["leaves"][0]["spec"].update(dtype="float64"), IntegrityError),
        (lambda t: t["leaves"][0]["spec"].update(kind="value"), IntegrityError),
        (lambda t: t.update(skeleton="[" * 100_000), CheckpointError),
        (lambda t: t.update(skeleton="{"), CheckpointError),
    ],
)
def test_a_forged_manifest_is_refused(copy, change, kind):
    edited(copy / MANIFEST, change)
    with pytest.raises(kind):
        load(copy)


def test_a_manifest_that_is_too_large_is_not_read(copy, monkeypatch):
    monkeypatch.setattr("ray_jax_ckpt.storage.segments.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(IntegrityError, match="more than the 100 bytes"):
        load(copy)


def test_a_directory_stands_for_the_only_checkpoint_in_it(tmp_path):
    with OrbaxCheckpointHandler() as handler:
        handler.save(tmp_path, {"a": np.arange(3)})
    np.testing.assert_array_equal(load(str(tmp_path)).state["a"], np.arange(3))


def test_a_runs_directory_stands_for_its_newest_whole_checkpoint(tmp_path):
    folder = tmp_path / "run" / "ray_jax_ckpt" / "checkpoints"
    folder.mkdir(parents=True)
    with OrbaxCheckpointHandler() as handler:
        for name, value in (("attempt-0001.0-step-000000009", 9), ("attempt-0002.0-step-000000007", 7)):
            shutil.move(handler.save(tmp_path / "saved", {"a": np.full(3, value)}, overwrite=True), folder / name)
    (folder / "attempt-0002.0-step-000000008").mkdir()
    for place in (tmp_path / "run", folder):
        # Newer is what a later attempt took, not what has the higher step.
        assert load(str(place)).state["a"].tolist() == [7, 7, 7]
