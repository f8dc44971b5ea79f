"""What a user calls a place on storage."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow.fs as pafs
import pytest
import ray.train

from ray_jax_ckpt.errors import ConfigError, NoCheckpointError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.storage.filesystem import describe, is_place, join, reading, resolve


def test_a_path_is_one_of_the_local_filesystem_and_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where, wanted in [("a/b/", tmp_path / "a/b"), (Path("/x/../y"), "/y"), ("~/c", Path.home() / "c")]:
        filesystem, path = resolve(where)
        assert isinstance(filesystem, pafs.LocalFileSystem)
        assert path == os.fspath(wanted)


def test_a_file_uri_is_a_path(tmp_path):
    assert resolve(f"file://{tmp_path}/a/")[1] == f"{tmp_path}/a"


def test_a_pair_a_checkpoint_and_a_keyword_say_the_filesystem(tmp_path):
    filesystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    checkpoint = ray.train.Checkpoint("a/b", filesystem=filesystem)
    for where in [("a/b", filesystem), checkpoint, SimpleNamespace(path="a/b", filesystem=filesystem)]:
        assert is_place(where)
        assert resolve(where) == (filesystem, "a/b")
    assert resolve("a/b", filesystem) == (filesystem, "a/b")
    assert resolve(ray.train.Checkpoint("/a/b"), filesystem)[0] is filesystem


def test_a_uri_on_a_given_filesystem_is_a_path_on_it(tmp_path):
    filesystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    assert resolve("s3://bucket/a?region=x", filesystem) == (filesystem, "bucket/a")


@pytest.mark.parametrize("endpoint", ["localhost:9", "http://localhost:9", "http://localhost:9/"])
def test_the_endpoint_of_an_s3_uri_may_have_its_scheme(endpoint):
    uri = f"s3://key:secret@bucket/a/b?endpoint_override={endpoint}&scheme=http&region=x"
    filesystem, path = resolve(uri)
    assert path == "bucket/a/b"
    assert filesystem == pafs.S3FileSystem(
        access_key="key", secret_key="secret", endpoint_override="localhost:9", scheme="http", region="x"
    )
    assert "secret" not in describe(filesystem, path)


def test_fsspec_filesystems_and_uris_are_taken():
    memory = fsspec.filesystem("memory")
    memory.pipe("/rjc/file", b"x")
    for where, given in [("/rjc", memory), ("memory://rjc", None), (("/rjc", memory), None)]:
        filesystem, path = resolve(where, given)
        with filesystem.open_input_stream(join(path, "file")) as file:
            assert file.read() == b"x"
    memory.rm("/rjc", recursive=True)


@pytest.mark.parametrize("where", [3, None, ("a", 3), ("a", pafs.LocalFileSystem(), 1), "", b"x", object()])
def test_what_is_no_place_is_refused(where):
    with pytest.raises(ConfigError, match=r"place|path"):
        resolve(where)


def test_unknown_schemes_and_filesystems_are_refused_in_words():
    with pytest.raises(ConfigError, match="neither pyarrow nor fsspec"):
        resolve("nosuch://a/b")
    with pytest.raises(ConfigError, match="filesystem= takes one of pyarrow or fsspec"):
        resolve("a", filesystem="s3")


def test_errors_of_filesystems_become_errors_of_this_package():
    with pytest.raises(NoCheckpointError, match="Reading x: there is no such file"), reading("Reading x"):
        raise FileNotFoundError("gone")
    with pytest.raises(StorageError, match=r"no such bucket.*NO_SUCH_BUCKET"), reading("Reading x"):
        raise OSError("AWS Error NO_SUCH_BUCKET during HeadObject")
    with pytest.raises(RestoreTimeoutError, match="late"), reading("Reading x"):
        raise RestoreTimeoutError("late")


def test_paths_join_at_the_root_too():
    assert [join("a", "b"), join("a/", "b", "c"), join("/", "b")] == ["a/b", "a/b/c", "/b"]
