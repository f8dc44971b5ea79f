"""Reported checkpoints as a coordinator finds them in the run's directory."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.fs
from written import hold, write

from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.reports import MAX_LOOKED_AT, Reports


def reported(run: Path, name: str, step: int) -> str:
    write(hold({"w": np.arange(4.0)}), run / name, run="run", step=step)
    return str(run / name)


def looked(reports: Reports) -> dict[int, str]:
    asyncio.run(reports.look(30.0))
    assert reports.problem == ""
    return {generation.step: path for generation, path in reports.found.items()}


def test_directories_of_others_crowd_out_none(tmp_path: Path):
    path = reported(tmp_path, "checkpoint_2026-01-01", 5)
    for number in range(MAX_LOOKED_AT + 1):
        (tmp_path / f"worker_{number}").mkdir()
    os.mkdir(os.fsencode(tmp_path) + b"/checkpoint_\xff")
    assert looked(Reports(RunIdentity("run", str(tmp_path), pyarrow.fs.LocalFileSystem()))) == {5: path}


def test_a_name_that_is_used_again_is_read_again(tmp_path: Path):
    reports = Reports(RunIdentity("run", str(tmp_path), pyarrow.fs.LocalFileSystem()))
    path = reported(tmp_path, "latest", 5)
    reports.told_of(path)
    assert looked(reports) == {5: path}
    shutil.rmtree(path)
    reported(tmp_path, "latest", 9)
    reports.told_of(path + "/")
    assert looked(reports) == {9: path}
