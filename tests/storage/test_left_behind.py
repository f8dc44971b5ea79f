"""What a driver that was killed has left in a run's books."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow.fs
from written import hold, write

from ray_jax_ckpt.memory.books_file import BooksFile
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.storage.records import Driver, State
from ray_jax_ckpt.storage.state import StateFile


def test_what_it_did_not_get_to_remove_is_listed_again(tmp_path: Path):
    files = pyarrow.fs.LocalFileSystem()
    names = [f"ray_jax_ckpt/checkpoints/attempt-0001.0-step-00000000{step}" for step in (1, 2, 3)]
    for step, name in enumerate(names[:2], 1):
        write(hold({"w": np.arange(4.0)}), tmp_path / name, run="run", step=step)
    # The third one is gone, but for what is no part of a checkpoint.
    (tmp_path / names[2]).mkdir()
    before = State(run="run", driver=Driver(id="before"), removing=(names[0], names[2]))
    StateFile(files, str(tmp_path)).save(before)
    books = BooksFile(RunIdentity("run", str(tmp_path), files), lambda: None)

    async def begin() -> None:
        await books.open(Driver(id="me"))
        assert await books.durable(30.0) == ""

    asyncio.run(begin())
    state = StateFile(files, str(tmp_path)).load().state
    assert sorted(one.path for one in state.checkpoints) == names[:2]
    assert state.removing == ()
