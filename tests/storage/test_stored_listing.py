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


def test_storage_that_hangs_is_not_waited_for_once_for_each_checkpoint(tmp_path: Path):
    disk, found = Hanging(), {}
    for step in range(20):
        path = tmp_path / f"ray_jax_ckpt/checkpoints/attempt-0001.0-step-{step:09d}"
        write(hold({"w": np.arange(4.0)}), path, run="run", step=step)
        found[Generation(1, 0, step)] = Persisted(Generation(1, 0, step), path=str(path))

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
