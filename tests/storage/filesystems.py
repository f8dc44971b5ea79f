"""An object store that tells what was read of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from sinks import Sink


class ObjectStore(Sink):
    """A `Sink` with the files of a directory, read as a server is: by ranges.

    Attributes:
        read: What was read: (key, first byte, size) each.
        before_read: Called with (key, first byte) before each read; may raise or wait.
    """

    def __init__(self, directory: Path | None = None, prefix: str = "bucket") -> None:
        super().__init__()
        self.read: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str, int], None] = lambda key, start: None
        self._reading = threading.Lock()
        for file in () if directory is None else directory.rglob("*"):
            if file.is_file():
                self.objects[f"{prefix}/{file.relative_to(directory)}"] = file.read_bytes()

    def open_input_file(self, path: str) -> pa.NativeFile:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.PythonFile(_Object(self, path), mode="r")

    open_input_stream = open_input_file

    def note(self, key: str, start: int, size: int) -> None:
        with self._reading:
            self.read.append((key, start, size))


class _Object:
    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key, self._at, self.closed = store, key, 0, False

    def read(self, size: int = -1) -> bytes:
        self._store.before_read(self._key, self._at)
        content = self._store.objects[self._key]
        stop = len(content) if size < 0 else min(len(content), self._at + size)
        self._store.note(self._key, self._at, stop - self._at)
        piece, self._at = content[self._at : stop], stop
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: self.size()}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return len(self._store.objects[self._key])

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
