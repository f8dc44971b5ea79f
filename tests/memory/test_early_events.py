"""What a run's books hear before storage has shown them the state."""

from __future__ import annotations

import asyncio

import pyarrow.fs

from ray_jax_ckpt.memory.books_file import BooksFile
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.storage.records import Driver
from ray_jax_ckpt.storage.state import StateFile


def test_one_that_makes_no_sense_takes_none_of_the_others_along(tmp_path, caplog):
    files = pyarrow.fs.LocalFileSystem()
    books = BooksFile(RunIdentity("run", str(tmp_path), files), lambda: None)
    books.heard("decision", 1.0, {"attempt": 1, "generation": None, "path": None})
    books.heard("persisting", 2.0, {"step": 5})
    books.heard("decision", 3.0, {"attempt": 2, "generation": None, "path": None})

    async def begin() -> None:
        await books.open(Driver(id="me"))
        assert await books.durable(30.0) == ""

    asyncio.run(begin())
    assert [one.attempt for one in StateFile(files, str(tmp_path)).load().state.attempts] == [1, 2]
    assert "does not have an event" in caplog.text
