"""Checkpoints found among other things, on any filesystem, and opened on machines unlike the one that wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.fs as pafs
import pytest
from sinks import Sink
from states import sharded
from support import find_checkpoints
from written import hold, write

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import TreeMismatchError
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import MANIFEST
from ray_jax_ckpt.storage.reader import verify
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.storage.runs import FOLDER, checkpoint_path, find_unfinished

LOCAL = pafs.LocalFileSystem()
W = {"w": jnp.zeros(2, jnp.int32)}

ELSEWHERE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import ray_jax_ckpt as rjc
from ray_jax_ckpt.storage.reader import read_manifest
import pyarrow.fs
assert len(jax.devices()) == int(sys.argv[2])
bare = rjc.restore(sys.argv[1]).state
assert type(bare["w"]) is np.ndarray
np.testing.assert_array_equal(bare["w"], np.arange(64).reshape(8, 8))
np.testing.assert_array_equal(bare["host"], np.arange(3))
z = NamedSharding(Mesh(np.array(jax.devices()), ("z",)), P("z"))
template = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=z), "one": jax.ShapeDtypeStruct((3,), np.float32)}
found = rjc.restore(sys.argv[1], template, partial=True).state
assert found["w"].sharding == z
np.testing.assert_array_equal(found["w"], np.arange(64).reshape(8, 8))
leaves = read_manifest(pyarrow.fs.LocalFileSystem(), sys.argv[1]).leaves
assert {one.spec["path"]: one.spec["shape"] for one in leaves} == {"['host']": [3], "['one']": [3], "['w']": [8, 8]}
print("ok")
"""


@pytest.mark.parametrize("num_devices", [1])
def test_what_four_devices_wrote_opens_where_there_are_fewer(tmp_path, num_devices):
    state = {"w": sharded(jnp.arange(64.0).reshape(8, 8), "a", "b"), "one": jnp.ones(3), "host": np.arange(3)}
    write(hold(state), tmp_path / "c")
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "c"), str(num_devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr


def test_a_dimension_that_does_not_divide_on_the_new_mesh_is_named(tmp_path):
    write(hold({"w": jnp.zeros((6, 2))}), tmp_path / "c")
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), "z"), jax.P("z"))
    with pytest.raises(TreeMismatchError, match=r"\['w'\].*float32\[6,2\].* 4 times"):
        load(tmp_path / "c", {"w": jnp.zeros((6, 2))}, shardings=rows)


def test_of_what_is_named_like_a_step_the_newest_that_is_whole_counts_and_nothing_is_removed(tmp_path, caplog):
    for step in (1, 3, 4):
        write(hold({"w": jnp.full(2, step)}), tmp_path / str(step), step=step)
    (tmp_path / "2" / "default").mkdir(parents=True)
    shutil.rmtree(tmp_path / "4" / "w")
    (tmp_path / "5").mkdir()
    # As tools copy it, which know nothing of Orbax's marks, and set other times.
    shutil.copytree(tmp_path / "3", tmp_path / "copy")
    (tmp_path / "copy" / "commit_success.txt").unlink()
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "copy").rename(tmp_path / "3")
    before = sorted(tmp_path.rglob("*"))
    found = load(tmp_path, W)
    assert (found.step, found.state["w"].tolist()) == (3, [3, 3])
    verify(LOCAL, found.path)
    assert "4 is not complete: w/" in caplog.text
    assert sorted(tmp_path.rglob("*")) == before
    rjc.OrbaxCheckpointHandler().save(tmp_path, {"w": jnp.full(2, 6)}, step=6, keep=1)
    assert set(before) <= set(tmp_path.rglob("*"))


class Shuffled(Sink):
    """Lists in no order, and twice what is new."""

    def get_file_info_selector(self, selector):
        return super().get_file_info_selector(selector)[::-1]


def filesystems(kind: str):
    if kind == "flat":
        return Sink().filesystem(), "bucket/run"
    if kind == "no order":
        return Shuffled().filesystem(), "bucket/run"
    if kind == "in memory":
        return pafs._MockFileSystem(), "bucket/run"
    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory", skip_instance_cache=True))), "bucket/run"


@pytest.mark.parametrize("kind", ["flat", "no order", "in memory", "fsspec"])
def test_a_run_finds_its_checkpoints_and_what_was_not_finished_on_any_filesystem(kind):
    files, run = filesystems(kind)
    paths = {step: checkpoint_path(run, Generation(1, 0, step)) for step in (10, 20, 30)}
    for step, path in paths.items():
        write(hold({"w": jnp.full(2, step)}), path, files, step=step)
    files.delete_file(f"{paths[20]}/{MANIFEST}")
    with files.open_output_stream(f"{run}/{FOLDER}/README") as stream:
        stream.write(b"a user's")
    assert {one.step for _, one in find_checkpoints(files, run)} == {10, 30}
    assert [info.step for info in rjc.checkpoints((run, files))] == [10, 30]
    assert load((run, files), W).state["w"].tolist() == [30, 30]
    assert list(find_unfinished(files, run, Generation(1, 0, 20))) == []
    assert [path.rpartition("/")[2] for path in find_unfinished(files, run)] == [paths[20].rpartition("/")[2]]
    assert load((paths[30], files), W).state["w"].tolist() == [30, 30]
    # Said first, and removed only when that is asked for.
    for dry_run in (True, True, False):
        (path,) = rjc.remove_unfinished((run, files), dry_run=dry_run)
        assert path.strip("/") == paths[20]
    assert rjc.remove_unfinished((run, files), dry_run=False) == []
    assert [info.step for info in rjc.checkpoints((run, files))] == [10, 30]
    assert files.get_file_info(f"{run}/{FOLDER}/README").size == 8
    # What was reported counts too.
    write(hold({"w": jnp.full(2, 40)}), f"{run}/checkpoint_2026-11-29_10-00-00.000000", files, step=40)
    assert load((run, files), W).state["w"].tolist() == [40, 40]
    if kind == "fsspec":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


class Moving(Sink):
    """As soon as something is read, the older checkpoint makes place for the newer one."""

    def __init__(self):
        super().__init__()
        self.newer = {}

    def open_input_stream(self, path):
        if self.newer:
            self.objects, self.newer = self.newer, {}
        return super().open_input_stream(path)


def test_a_newer_checkpoint_is_found_although_the_older_one_goes_while_it_is_looked_for():
    sink = Moving()
    files = sink.filesystem()
    for step in (20, 10):
        sink.newer, sink.objects = sink.objects, {}
        write(hold({"w": jnp.full(2, step)}), checkpoint_path("bucket/run", Generation(1, 0, step)), files, step=step)
    assert [info.step for info in rjc.checkpoints(("bucket/run", files))] == [20]


def test_only_what_this_package_named_is_taken_for_unfinished(tmp_path):
    folder = Path(tmp_path, FOLDER)
    left = ["attempt-0001.0-step-000000010.orbax-checkpoint-tmp", "attempt-0002.1-step-000000005"]
    for name in [*left, "attempt-1", "mine", "12", "attempt-0001.0-step-000000010-copy"]:
        (folder / name).mkdir(parents=True)
    assert sorted(Path(path).name for path in find_unfinished(LOCAL, str(tmp_path))) == left
    assert [Path(path).name for path in find_unfinished(LOCAL, str(tmp_path), Generation(2, 1, 5))] == left[:1]
