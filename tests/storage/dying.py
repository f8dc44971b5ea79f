"""A filesystem on a directory that stops in the middle of things, as if its process had been killed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from sinks import Handler


class Killed(OSError):
    """Nothing is done any more."""


class Dying(Handler):
    """Changes a directory so many times; the last change is half done if it can be.

    Attributes:
        left: Changes that are still made. None: any number.
        done: Changes so far.
    """

    name = "dying"

    def __init__(self, left: int | None = None) -> None:
        self._files = pafs.LocalFileSystem()
        self.left, self.done = left, 0

    def count(self) -> None:
        if self.left == 0:
            raise Killed("killed")
        self.left = None if self.left is None else self.left - 1
        self.done += 1

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self._files.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._files.get_file_info(selector)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._files.open_input_stream(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self._files.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        self.count()
        return pa.PythonFile(_Output(self, self._files.open_output_stream(path)), mode="w")

    def create_dir(self, path: str, recursive: bool) -> None:
        self.count()
        self._files.create_dir(path, recursive=recursive)

    def move(self, src: str, dest: str) -> None:
        self.count()
        self._files.move(src, dest)

    def delete_file(self, path: str) -> None:
        self.count()
        self._files.delete_file(path)

    def delete_dir(self, path: str) -> None:
        self.count()
        self._files.delete_dir(path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    delete_dir_contents = delete_root_dir_contents = copy_file = open_append_stream = _refuse


class _Output:
    """Two changes: half of the bytes, and the rest."""

    def __init__(self, disk: Dying, stream: Any) -> None:
        self._disk, self._stream, self.closed = disk, stream, False

    def write(self, piece: Any) -> int:
        half = len(piece) // 2
        for part in (bytes(piece)[:half], bytes(piece)[half:]):
            try:
                self._disk.count()
            except Killed:
                # What has been written stays, and nobody is left to remove it.
                self._stream.close()
                raise
            self._stream.write(part)
        return len(piece)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._stream.close()

    def writable(self) -> bool:
        return True
