"""Whoever is killed while he replaces a checkpoint leaves the old one or the new one, whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.fs as pafs
import pytest
from orbax.checkpoint import v1
from replacing_process import NEW
from sinks import Sink, failing

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import PersistError
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.storage.spares import spare
from ray_jax_ckpt.testing.equality import assert_identical

OLD = {"w": np.zeros(50)}
_SCRIPT = Path(__file__).parent / "replacing_process.py"
PLACES = {
    "rename": pafs.LocalFileSystem(),
    "no rename": pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("local"))),
}


@pytest.fixture
def handler():
    with rjc.OrbaxCheckpointHandler() as one:
        yield one


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """What replacing_process.py leaves."""
    old, folder = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("killed")
    with rjc.OrbaxCheckpointHandler() as handler:
        handler.save(old, OLD, step=7)
    command = [sys.executable, str(_SCRIPT), str(old), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def content(found) -> str:
    """Which of the two it is, if it is one of them bit for bit."""
    name = "new" if "new" in found else "old"
    assert_identical(found, NEW if name == "new" else OLD)
    return name


@pytest.mark.parametrize("how", PLACES)
def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(handler, killed, how):
    directories = sorted((killed / how).iterdir(), key=lambda one: int(one.name))[:-1]
    found = []
    for directory in directories:
        place = (str(directory), PLACES[how])
        assert list(handler.list_checkpoints(place)) == [7]
        found.append(content(handler.restore(place)))
        if spare(f"{directory}/ckpt-7") in map(str, directory.iterdir()):
            assert content(load(f"{directory}/ckpt-7", filesystem=place[1]).state) == found[-1]
        if len(found) % 3 == 0:
            handler.save(place, OLD, step=8, keep=2)
            assert content(handler.restore(place, step=7)) == found[-1]
        elif len(found) % 3 == 1:
            handler.save(place, NEW, step=7, overwrite=True)
            assert os.listdir(directory) == ["ckpt-7"]
    # There was something to be killed in, and the new one comes once and for all.
    assert len(found) > 20
    assert found == sorted(found, reverse=True)
    assert {*found} == {"old", "new"}


def test_a_failed_replacement_in_an_object_store_leaves_one(handler):
    sink = Sink()
    place = ("b", sink.filesystem())
    handler.save(place, OLD)
    # The first to be written is the spare.
    for path, wanted in (("b/checkpoint.old", "old"), ("b/checkpoint/w", "new")):
        sink.on_write = failing(10**9, lambda: PermissionError("denied"), path)
        with pytest.raises(PersistError, match="denied"):
            handler.save(place, NEW, overwrite=True)
        assert content(handler.restore(place)) == wanted
    with pytest.raises(FileExistsError, match="is there already"):
        handler.save(place, OLD)
    sink.on_write = lambda path, size: None
    handler.save(place, OLD, overwrite=True)
    assert content(handler.restore(place)) == "old"
    assert not any(".old" in key for key in sink.objects)


def test_a_checkpoint_of_orbax_that_was_being_replaced_comes_back(handler, tmp_path):
    v1.save(tmp_path / "ckpt-7", OLD)
    os.rename(tmp_path / "ckpt-7", spare(f"{tmp_path}/ckpt-7"))
    np.testing.assert_array_equal(handler.restore(tmp_path)["w"], OLD["w"])
    with pytest.raises(FileExistsError, match="is there already"):
        handler.save(tmp_path, NEW, step=7)
    assert os.listdir(tmp_path) == ["ckpt-7"]


def test_a_surplus_step_goes_with_its_spare(handler, tmp_path):
    for step in (1, 2):
        handler.save(tmp_path, OLD, step=step, keep=None)
    os.rename(tmp_path / "ckpt-1", spare(f"{tmp_path}/ckpt-1"))
    handler.save(tmp_path, OLD, step=3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-2", "ckpt-3"]
