"""Two spellings of one storage path are one run; two places are never the same run."""

from __future__ import annotations

import os
import types
from pathlib import Path

import fsspec
import pyarrow.fs
import pytest

from ray_jax_ckpt import manager
from ray_jax_ckpt.memory.fleet import run_digest
from ray_jax_ckpt.observe.events import EventLog
from ray_jax_ckpt.run_identity import canonical
from ray_jax_ckpt.storage.files import write_whole

LOCAL = pyarrow.fs.LocalFileSystem()


def digest(filesystem, path):
    return run_digest(*canonical(filesystem, str(path)))


def s3(**options):
    return pyarrow.fs.S3FileSystem(**{"region": "eu-west-1", "access_key": "a", "secret_key": "b"} | options)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "real dir" / "ü").mkdir(parents=True)
    os.symlink(tmp_path / "real dir", tmp_path / "link")
    return tmp_path


def test_spellings_of_a_local_path_are_one_run(place):
    wanted = digest(LOCAL, place / "real dir" / "ü" / "run 1")
    spellings = [
        f"{place}/link/ü/run 1",
        f"{place}/real dir/ü/run 1/",
        f"{place}//real dir/./ü/run 1",
        f"{place}/link/../real dir/ü/run 1",
        os.path.join("/..", str(place)[1:], "link/ü/run 1"),
    ]
    assert {digest(LOCAL, each) for each in spellings} == {wanted}
    others = [
        pyarrow.fs.SubTreeFileSystem(str(place / "link"), LOCAL),
        pyarrow.fs.SubTreeFileSystem("ü", pyarrow.fs.SubTreeFileSystem(str(place / "real dir"), LOCAL)),
        pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("file"))),
    ]
    paths = ["ü/run 1", "run 1/", str(place / "link" / "ü" / "run 1")]
    assert {digest(*each) for each in zip(others, paths, strict=True)} == {wanted}


def test_different_places_are_different_runs(place):
    memory = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory")))
    places = [
        (LOCAL, place / "a"),
        (LOCAL, place / "b"),
        (LOCAL, place / "A"),
        (LOCAL, place / "a" / "b"),
        (LOCAL, place / "a b"),
        (LOCAL, place / "real dir"),
        (pyarrow.fs.SubTreeFileSystem(str(place / "one"), LOCAL), "run"),
        (pyarrow.fs.SubTreeFileSystem(str(place / "two"), LOCAL), "run"),
        (memory, place / "a"),
        (s3(), "bucket/run"),
        (s3(), "bucket/../run"),
        (s3(endpoint_override="http://one:9000"), "bucket/run"),
        (s3(endpoint_override="http://two:9000"), "bucket/run"),
        (pyarrow.fs.GcsFileSystem(anonymous=True), "bucket/run"),
        (pyarrow.fs.AzureFileSystem(account_name="one", account_key="a2V5"), "bucket/run"),
        (pyarrow.fs.AzureFileSystem(account_name="two", account_key="a2V5"), "bucket/run"),
        (LOCAL, "relative"),
    ]
    assert len({digest(*each) for each in places}) == len(places)


def test_credentials_and_slashes_do_not_make_another_run():
    runs = [
        (s3(), "bucket/run"),
        (s3(access_key="c", secret_key="d", session_token="e"), "bucket/run/"),
        (s3(region="us-east-1"), "bucket//run"),
        (pyarrow.fs.SubTreeFileSystem("bucket", s3()), "run"),
    ]
    assert len({digest(*each) for each in runs}) == 1
    assert "secret" not in str(canonical(s3(secret_key="secret", endpoint_override="http://one"), "bucket/run"))


@pytest.mark.parametrize("name", ["a b", "ключ", "run/", "x'\"%41", "link/../run"])
def test_events_are_written_whatever_the_path_looks_like(place, name):
    log = EventLog(LOCAL, f"{place}/{name}", write=write_whole)
    log.add("decision", step=3)
    log.flush(20)
    assert '"step": 3' in Path(place, name, "ray_jax_ckpt", "events.jsonl").read_text()


def test_a_relative_storage_path_is_warned_of():
    storage = types.SimpleNamespace(storage_filesystem=LOCAL, experiment_fs_path="runs/a")
    failures = types.SimpleNamespace(max_failures=1)
    config = types.SimpleNamespace(storage_context=storage, failure_config=failures)
    with pytest.warns(RuntimeWarning, match=r"'runs/a' is relative.*absolute storage_path"):
        manager.warn_of_settings(types.SimpleNamespace(run_config=config), LOCAL, "runs/a")
