"""The manifest: what it says comes back, and what is damaged or forged is refused in words and within bounds."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from ray_jax_ckpt.errors import IntegrityError, NotSupportedError
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    FileRecord,
    LeafRecord,
    Manifest,
    RankItem,
    RankRecord,
    check_path,
    parse_manifest,
    parse_rank,
    rank_file,
)

WEIGHT = LeafSpec("['w']", "array", (4, 6), "bfloat16", False, None, [["d", "w"]])
NAME = LeafSpec("['name']", "value", (), "str", False, None, [["d", "name"]])
FILES = {
    rank_file(0): FileRecord(size=2, digest="xxh3:1"),
    "w/zarr.json": FileRecord(size=10, digest="xxh3:2"),
    "w/c/0/0": FileRecord(size=24, digest="xxh3:3"),
    "w/c/0/1": FileRecord(size=24, digest="xxh3:4"),
}
LEAVES = (
    LeafRecord(spec=NAME.to_json(), name="", form="value"),
    LeafRecord(spec=WEIGHT.to_json(), name="w", form="chunks", shape=(4, 6), dtype="bfloat16", chunks=(4, 3)),
)


def manifest(**changes):
    fields = {"format": 1, "leaves": LEAVES, "files": FILES, "values": {0: "gpt"}, "step": 7, "attempt": 2}
    return Manifest(**{**fields, **changes})


def changed(**changes):
    """Bytes of a manifest with fields replaced."""
    return json.dumps({**json.loads(manifest().to_bytes()), **changes}).encode()


def changed_leaf(**changes):
    tree = json.loads(manifest().to_bytes())
    tree["leaves"][1].update(changes)
    return json.dumps(tree).encode()


def test_a_manifest_comes_back_as_it_was_written():
    written = manifest(metrics={0: {"loss": 0.5, "worst": math.inf}}, run="run7", restores=1)
    read = parse_manifest(written.to_bytes(), "here")
    assert read == written
    assert read.generation == Generation(2, 1, 7)
    assert [LeafSpec.from_json(leaf.spec) for leaf in read.leaves] == [NAME, WEIGHT]


def test_a_nan_metric_comes_back_as_one_and_is_strict_json_on_storage():
    raw = manifest(metrics={0: {"loss": math.nan}}).to_bytes()
    json.loads(raw, parse_constant=lambda name: pytest.fail(name))
    assert math.isnan(parse_manifest(raw, "here").metrics[0]["loss"])


def test_fields_that_a_newer_version_adds_are_passed_over():
    assert parse_manifest(changed(color="red"), "here") == manifest()
    assert parse_manifest(changed_leaf(color="red"), "here") == manifest()


def test_a_newer_format_is_refused_in_words():
    with pytest.raises(NotSupportedError, match=r"run/5/manifest has format 2, .* reads up to 1. Install a newer one"):
        parse_manifest(changed(format=2), "run/5/manifest")


@pytest.mark.parametrize("format", [None, "1", 0, -1, True, 1.5])
def test_what_has_no_format_is_no_manifest(format):
    with pytest.raises(IntegrityError, match="not the manifest of a checkpoint"):
        parse_manifest(changed(format=format), "here")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": 1}',
        b"[" * 200_000,
        b'{"format":1,"values":' + b'{"a":' * 200_000,
    ],
)
def test_damaged_bytes_are_refused(raw):
    with pytest.raises(IntegrityError, match="here"):
        parse_manifest(raw, "here")
    with pytest.raises(IntegrityError, match="here"):
        parse_rank(raw, "here")


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a/", "a\nb", "a\x00b", "a\x85", "x" * 256, "x/" * 600 + "x"],
)
def test_paths_that_leave_the_directory_or_fit_no_filesystem_are_refused(path):
    with pytest.raises(ValueError, match="the path"):
        check_path(path)
    with pytest.raises(IntegrityError, match="the path"):
        parse_manifest(
            changed(files={**json.loads(manifest().to_bytes())["files"], path: {"size": 0, "digest": ""}}), "h"
        )
    if path:
        with pytest.raises(IntegrityError, match=r"the path"):
            parse_manifest(changed_leaf(name=path), "here")


def test_a_leaf_may_lie_in_the_checkpoint_itself():
    leaf = LeafRecord(spec=WEIGHT.to_json(), name="", form="chunks", shape=(2,), dtype="uint8", chunks=(2,))
    files = {rank_file(0): FILES[rank_file(0)], "c/0": FileRecord(size=2, digest="")}
    read = parse_manifest(manifest(leaves=(leaf,), files=files).to_bytes(), "here")
    assert read.leaves[0].path("c/0") == "c/0"


@pytest.mark.parametrize("path", ["w/c/0", "~/x", "a b/é/…", "...", ".a", "a..b", "a\\b", "%2e%2e"])
def test_unusual_names_are_no_danger(path):
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [4, -6]}, "greater than or equal to 0"),
        ({"shape": [4, 5]}, "do not divide"),
        ({"shape": [2**40, 6], "chunks": [1, 6]}, "more chunks than files"),
        ({"shape": [8, 6], "chunks": [8, 3]}, "needs w/c/0/0 with 48 bytes"),
        ({"shape": [8, 6]}, "does not name it"),
        ({"chunks": None}, "with chunks None"),
        ({"chunks": [4]}, "with chunks"),
        ({"chunks": [0, 3]}, "greater than 0"),
        ({"dtype": "O"}, "no plain element type"),
        ({"dtype": "no such"}, "not understood"),
        ({"dtype": "float32"}, "needs w/c/0/0 with 48 bytes"),
        ({"form": "pickle"}, "chunks"),
        ({"spec": {}}, "not the description of a leaf"),
        ({"name": "other"}, "does not name it"),
        ({"form": "value"}, "lacks the value of leaf 1"),
    ],
)
def test_leaves_that_cannot_be_are_refused(changes, said):
    with pytest.raises(IntegrityError, match=said):
        parse_manifest(changed_leaf(**changes), "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 10**12}, "cannot hold those of 1000000000000 ranks"),
        ({"world_size": 2}, "names no ray_jax_ckpt/rank_1.json"),
        ({"world_size": 0}, "greater than 0"),
        ({"files": {}}, "cannot hold"),
        ({"step": -1}, "greater than or equal to 0"),
        ({"values": {}}, "lacks the value of leaf 0"),
    ],
)
def test_manifests_that_cannot_be_are_refused(changes, said):
    with pytest.raises(IntegrityError, match=said):
        parse_manifest(changed(**changes), "here")


def test_a_manifest_does_not_name_itself():
    with pytest.raises(ValueError, match="names itself"):
        manifest(files={**FILES, MANIFEST: FileRecord(size=1, digest="")})


def test_block_digests_cover_the_file():
    FileRecord(size=BLOCK_BYTES + 1, digest="", blocks=("a", "b"))
    with pytest.raises(ValueError, match="1 block digests"):
        FileRecord(size=BLOCK_BYTES + 1, digest="", blocks=("a",))


def test_a_forged_shape_costs_no_memory():
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            parse_manifest(changed_leaf(shape=[2**60] * 3, chunks=[1] * 3), "here")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_what_a_rank_had_to_itself_comes_back():
    item = RankItem(leaf=3, box=((0, 4), (2, 6)), offset=64, size=32, digest="xxh3:5")
    record = RankRecord(rank=1, data={"value": {"epoch": 3}}, values={2: 0.5}, items=(item,))
    assert parse_rank(record.to_bytes(), "here") == record
    with pytest.raises(IntegrityError, match=r"items\.0\.box"):
        parse_rank(record.to_bytes().replace(b"[2,6]", b"[-2,6]"), "here")
