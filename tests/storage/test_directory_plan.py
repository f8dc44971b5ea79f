"""Plans: every byte of a generation has its place in one file, known before anything is written."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pyarrow.fs
import pytest
import tensorstore as ts
from written import hold, hold_group, write

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import UnsupportedLeafError
from ray_jax_ckpt.model.shards import whole
from ray_jax_ckpt.storage import plan as plans
from ray_jax_ckpt.storage.grid import chunk_shape, chunks_of, num_chunks, split
from ray_jax_ckpt.storage.manifest import MANIFEST, parse_manifest, parse_rank, rank_blob, rank_file
from ray_jax_ckpt.storage.plan import About, plan_files
from ray_jax_ckpt.storage.writer import Target
from ray_jax_ckpt.storage.zarr import ELEMENT_TYPES, describe_array

FILES = pyarrow.fs.LocalFileSystem()


def state(rank: int, **own):
    return {"w": jnp.arange(48, dtype=jnp.float32).reshape(8, 6), "n": np.arange(5), "lr": 0.5, **own}


def read_array(path, name):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}
    return ts.open(spec).result().read().result()


# Chunks.


def test_evenly_sharded_arrays_have_a_chunk_per_shard():
    boxes = [((a, a + 4), (b, b + 3)) for a in (0, 4) for b in (0, 3)]
    assert chunk_shape((8, 6), boxes) == (4, 3)
    assert [key for key, _ in chunks_of(whole((8, 6)), (4, 3))] == ["c/0/0", "c/0/1", "c/1/0", "c/1/1"]


def test_unevenly_sharded_arrays_are_cut_so_that_all_chunks_are_full():
    assert chunk_shape((10,), [((0, 4),), ((4, 10),)]) == (2,)
    assert list(chunks_of(((4, 10),), (2,))) == [("c/2", ((4, 6),)), ("c/3", ((6, 8),)), ("c/4", ((8, 10),))]


def test_arrays_without_elements_or_dimensions_have_legal_chunks():
    assert chunk_shape((0, 3), [((0, 0), (0, 3))]) == (1, 3)
    assert num_chunks((0, 3), (1, 3)) == 0
    assert (num_chunks((), ()), list(chunks_of((), ()))) == (1, [("c", ())])


def test_large_chunks_are_split_evenly_along_leading_axes():
    assert split((8, 6), 4, 192) == (8, 6)
    assert split((8, 6), 4, 191) == (4, 6)
    assert split((7, 6), 4, 100) == (1, 6)
    assert split((2, 6), 4, 9) == (1, 2)
    assert split((1, 5), 4, 4) == (1, 1)
    assert split((3,), 8, 4) == (1,)
    assert split((), 8, 4) == ()


def test_arrays_are_described_as_tensorstore_does():
    for name in sorted(ELEMENT_TYPES):
        for shape in ((), (4, 2), (0, 3)):
            chunks = chunk_shape(shape, [whole(shape)])
            spec = {
                "driver": "zarr3",
                "kvstore": "memory://",
                "metadata": {
                    "codecs": [{"name": "bytes"}],
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
                },
            }
            made = ts.open(spec, dtype=ts.dtype(name), shape=shape, create=True).result()
            assert json.loads(describe_array(shape, name, chunks)) == json.loads(made.kvstore[b"zarr.json"]), name


# Plans.


def test_sizes_and_digests_are_known_before_anything_is_written(tmp_path):
    plan = hold(state(0)).plan()
    manifest = write(hold(state(0)), tmp_path / "c")
    for file in plan.files:
        assert manifest.files[file.path].size == file.size
        if file.path not in ("_CHECKPOINT_METADATA",):
            assert manifest.files[file.path].digest == file.digest


def test_the_manifest_names_every_file_that_lies_there(tmp_path):
    manifest = write(hold(state(0)), tmp_path / "c")
    there = {str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert there == {*manifest.files, MANIFEST}
    for path, record in manifest.files.items():
        content = (tmp_path / "c" / path).read_bytes()
        assert (len(content), digest(content)) == (record.size, record.digest)
    assert parse_manifest((tmp_path / "c" / MANIFEST).read_bytes(), "here") == manifest


def test_replicated_content_is_stored_once_and_shards_by_their_ranks(tmp_path):
    held = hold_group([state(rank) for rank in range(4)])
    plan = held.plan()
    assert {file.path: file.writer for file in plan.files if file.path.startswith("w/c/")} == {
        f"w/c/{rank}/0": rank for rank in range(4)
    }
    manifest = write(held, tmp_path / "c")
    assert not any(path.endswith(".bin") for path in manifest.files)
    np.testing.assert_array_equal(read_array(tmp_path / "c", "w"), np.asarray(state(0)["w"]))
    np.testing.assert_array_equal(read_array(tmp_path / "c", "n"), np.arange(5))
    assert manifest.metrics == {rank: {"loss": rank / 2} for rank in range(4)}
    assert (manifest.world_size, manifest.attempt, manifest.restores, manifest.step) == (4, 2, 1, 7)


def test_unevenly_sharded_content_is_cut_out_of_the_shards(tmp_path):
    wide = {"w": jnp.arange(30).reshape(10, 3), "v": jnp.arange(7)}
    manifest = write(hold_group([wide] * 3), tmp_path / "c")
    assert [leaf.chunks for leaf in manifest.leaves] == [(1,), (2, 3)]
    np.testing.assert_array_equal(read_array(tmp_path / "c", "w"), np.asarray(wide["w"]))
    np.testing.assert_array_equal(read_array(tmp_path / "c", "v"), np.asarray(wide["v"]))


def test_a_shard_that_is_cut_along_both_axes_is_cut_right(tmp_path):
    held = hold({"w": jnp.arange(48).reshape(8, 6)})
    piece = plans.Piece("s", 0, 48 * 4, whole((8, 6)), ((2, 4), (3, 5)), 4)
    content = np.arange(48, dtype=np.int32).view(np.uint8)
    assert piece.size == 16
    assert piece.cut(content).view(np.int32).tolist() == [15, 16, 21, 22]
    assert held.plan().num_bytes > 48 * 4


def test_leaves_so_uneven_that_there_would_be_a_chunk_per_element_are_refused(monkeypatch):
    monkeypatch.setattr(plans, "_MAX_CHUNKS", 5)
    with pytest.raises(UnsupportedLeafError, match=r"\['v'\] of shape \(7,\) is cut so unevenly .* 7 chunks"):
        hold_group([{"v": jnp.arange(7)}] * 3).plan()


def test_what_differs_on_a_rank_is_kept_beside_what_rank_0_has(tmp_path):
    states = [state(0), state(1) | {"n": np.arange(3), "lr": 0.25}, state(2)]
    held = hold_group(states, data=[{"value": rank} for rank in range(3)], blobs=[b"a", b"bb", b"ccc"])
    manifest = write(held, tmp_path / "c")
    records = [parse_rank((tmp_path / "c" / rank_file(rank)).read_bytes(), "here") for rank in range(3)]
    assert [record.data for record in records] == [{"value": 0}, {"value": 1}, {"value": 2}]
    assert [len(record.items) for record in records] == [0, 1, 0]
    assert records[1].values == {0: 0.25}
    assert records[1].specs[1]["shape"] == [3]
    item, blob = records[1].items[0], (tmp_path / "c" / rank_blob(1)).read_bytes()
    assert (item.leaf, item.box) == (1, ((0, 3),))
    assert blob[item.offset : item.offset + item.size] == np.arange(3).tobytes()
    assert digest(blob[item.offset : item.offset + item.size]) == item.digest
    assert blob[records[1].blobs[0].offset :] == b"bb"
    assert [leaf.local for leaf in manifest.leaves] == [True, True, False]
    np.testing.assert_array_equal(read_array(tmp_path / "c", "n"), np.arange(5))


def test_what_was_not_digested_is_not_taken_for_equal(tmp_path):
    held = hold_group([state(0), state(1)], verify=False)
    manifest = write(held, tmp_path / "c")
    assert rank_blob(1) in manifest.files
    assert all(record.digest for record in manifest.files.values())


def test_files_are_shared_out_evenly_among_the_ranks_that_hold_them():
    held = hold_group([state(0) | {f"n{i}": np.full(64, i) for i in range(8)}] * 2)
    everybody = {part: range(2) for part in held.parts}
    plan = plan_files(held.indices, held.orbax, About(), holders=everybody)
    sizes = [sum(file.size for file in plan.of(rank)) for rank in range(2)]
    assert abs(sizes[0] - sizes[1]) < 600
    assert plan.of(0) == plan_files(held.indices, held.orbax, About(), holders=everybody).of(0)


def test_a_manifest_is_not_made_of_files_that_are_missing_or_differ(tmp_path):
    held = hold(state(0))
    plan = held.plan(created_at_s=1.0)
    manifest = write(held, tmp_path / "c", created_at_s=1.0)
    assert plan.manifest(manifest.files) == manifest
    files = dict(manifest.files)
    with pytest.raises(ValueError, match="w/c/0/0: planned"):
        plan.manifest({path: record for path, record in files.items() if path != "w/c/0/0"})
    with pytest.raises(ValueError, match="w/c/0/0: planned"):
        plan.manifest({**files, "w/c/0/0": files["w/zarr.json"]})


def test_a_directory_that_is_being_written_is_no_checkpoint_to_others(tmp_path):
    target = Target(FILES, str(tmp_path / "c"))
    assert target.base == str(tmp_path / "c.orbax-checkpoint-tmp")
