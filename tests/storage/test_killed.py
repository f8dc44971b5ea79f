"""A writer that is killed at any moment, or meets a limit of the system, leaves no checkpoint and loses none."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import jax.numpy as jnp
import numpy as np
import pyarrow.fs as pafs
import pytest
from orbax.checkpoint.utils import is_tmp_checkpoint
from written import hold, write

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError
from ray_jax_ckpt.storage.files import TEMPORARY, renames
from ray_jax_ckpt.storage.restore import load

_SCRIPT = Path(__file__).parent / "writer_process.py"
STATE = {"w": jnp.arange(5000, dtype=jnp.float32), "b": jnp.ones(3)}
OLD = {"w": jnp.zeros(5000), "b": jnp.zeros(3)}
MOMENTS = {
    "disk": ["first", "data half", "manifest half", "rename", "too large"],
    "no rename": ["data half", "manifest"],
}


def write_and_die(pickled: Path, path: Path, kind: str, moment: str) -> int:
    command = [sys.executable, str(_SCRIPT), str(pickled), str(path), kind, moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (-signal.SIGKILL, 3), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    held = hold(STATE)
    path = tmp_path_factory.mktemp("held") / "held.pickle"
    path.write_bytes(pickle.dumps({"plan": held.plan(), "parts": held.parts}))
    return path


@pytest.mark.parametrize(("kind", "moment"), [(kind, moment) for kind, names in MOMENTS.items() for moment in names])
def test_a_killed_writer_leaves_no_checkpoint_and_the_next_one_is_whole(pickled, tmp_path, kind, moment):
    with rjc.OrbaxCheckpointHandler() as handler:
        handler.save(tmp_path, OLD, step=1, keep=None)
        path = tmp_path / "ckpt-2"
        assert write_and_die(pickled, path, kind, moment) == (3 if moment == "too large" else -signal.SIGKILL)
        assert handler.get_checkpoint_steps(tmp_path) == [1]
        np.testing.assert_array_equal(handler.restore(tmp_path)["w"], np.zeros(5000))
        left = path if kind == "no rename" else tmp_path / f"ckpt-2{TEMPORARY}"
        assert left.exists() or moment == "first"
        # To one that has its manifest only the name is missing.
        if moment != "rename":
            with pytest.raises((NoCheckpointError, IntegrityError)):
                load(left)
        write(hold(STATE), path)
        assert handler.get_checkpoint_steps(tmp_path) == [1, 2]
        np.testing.assert_array_equal(handler.restore(tmp_path)["w"], np.arange(5000))
        assert sorted(one.name for one in tmp_path.iterdir()) == ["ckpt-1", "ckpt-2"]


def test_orbax_too_takes_a_directory_with_our_suffix_for_one_that_is_being_written(tmp_path):
    for name in (f"5{TEMPORARY}", f"5.old{TEMPORARY}", "5"):
        (tmp_path / name).mkdir()
    assert is_tmp_checkpoint(tmp_path / f"5{TEMPORARY}")
    assert is_tmp_checkpoint(tmp_path / f"5.old{TEMPORARY}")
    assert not is_tmp_checkpoint(tmp_path / "5")


def test_a_writer_needs_no_jax():
    code = "import sys, ray_jax_ckpt.storage.writer, ray_jax_ckpt.storage.ocdbt; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"jax", "jaxlib", "orbax", "flax", "ray"} & set(done.stdout.split())


def test_filesystems_that_rename_are_known():
    local = pafs.LocalFileSystem()
    assert renames(local)
    assert renames(pafs.SubTreeFileSystem("/tmp", local))
    assert not renames(pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("local"))))
