"""A run's checkpoints as its coordinator looks at them, on storage that hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from written import hold, write

from ray_jax_ckpt.errors import RestoreError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.stored import MAX_LATE, Stored
from ray_jax_ckpt.model.persistence import Persisted
from ray_jax_ckpt.model.shards import Generation


class Hanging(pyarrow.fs.FSSpecHandler):
    """A local disk on which files cannot be opened before it is told so. Knows which ones were to be."""

    def __init__(self) -> None:
        import fsspec

        super().__init__(fsspec.filesystem("file"))
        self.opened: list[str] = []
        self.goes_on = threading.Event()

    def open_input_stream(self, path: str) -> Any:
        self.opened.append(path)
        self.goes_on.wait(60)
        return super().open_input_stream(path)


def written(run: Path, attempt: int, step: int) -> Persisted:
    path = run / f"ray_jax_ckpt/checkpoints/attempt-{attempt:04d}.0-step-{step:09d}"
    write(hold({"w": np.arange(4.0)}), path, run="run", step=step)
    return Persisted(Generation(attempt, 0, step), path=str(path))


def chunk_of(one: Persisted) -> Path:
    return next(path for path in Path(one.path, "w", "c").rglob("*") if path.is_file())


def test_to_start_from_the_beginning_where_all_that_was_is_broken_is_refused(tmp_path: Path):
    found = {one.generation: one for one in (written(tmp_path, 1, 1), written(tmp_path, 1, 2))}
    older, newer = found.values()
    hidden = {one.path: chunk_of(one).rename(tmp_path / f"hidden {n}") for n, one in enumerate((older, newer))}

    async def look() -> None:
        stored = Stored(RunIdentity("run", str(tmp_path), pyarrow.fs.LocalFileSystem()))
        await stored.look_back(60.0)
        stored.known = dict(found)
        with pytest.raises(RestoreError, match=r"Nothing .*step-000000002: .*step-000000001: .*resume='never'"):
            await stored.newest(None, 60.0)
        # Memory goes on all the same; and what storage only showed late serves the next time.
        hidden[older.path].rename(Path(older.path, "w", "c", "0"))
        place = await stored.newest(None, 60.0)
        assert place is not None
        assert place.path == older.path
        assert list(stored.bad) == [newer.path]
        # Ranks find that this one is damaged, too.
        stored.suspect(older.path, "w: its digest differs")
        assert await stored.newest(Generation(1, 0, 0), 60.0) is None
        with pytest.raises(RestoreError, match=r"Nothing .*step-000000001: w: its digest differs"):
            await stored.newest(None, 60.0)
        # Unless the driver wants nothing of it.
        fresh = Stored(RunIdentity("run", str(tmp_path), pyarrow.fs.LocalFileSystem()))
        await fresh.look_back(60.0)
        fresh.set_aside(2)
        assert await fresh.newest(None, 60.0) is None

    asyncio.run(look())


def test_storage_that_hangs_is_not_waited_for_once_for_each_checkpoint(tmp_path: Path):
    disk, found = Hanging(), {}
    for one in (written(tmp_path, 1, step) for step in range(20)):
        found[one.generation] = one

    async def look() -> None:
        stored = Stored(RunIdentity("run", str(tmp_path), pyarrow.fs.PyFileSystem(disk)))
        stored.known = found
        try:
            # Memory has nothing newer, or nothing at all.
            assert await stored.newest(Generation(1, 0, 3), 0.3) is None
            with pytest.raises(RestoreError, match="cannot be read"):
                await stored.newest(None, 0.3)
        finally:
            disk.goes_on.set()
        # Nothing that was only slow is lost.
        place = await stored.newest(None, 60.0)
        assert place is not None
        assert place.generation.step == 19

    asyncio.run(look())
    assert len(disk.opened) <= 2 * MAX_LATE + 1
