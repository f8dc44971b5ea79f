"""Filesystems that take checkpoints, and misbehave when told to: object stores, quotas, failures, a real S3 server."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs


class Handler(pafs.FileSystemHandler):
    """What all of them have in common: each is equal to itself only, and takes paths as they are."""

    name = "handler"

    def filesystem(self) -> pafs.PyFileSystem:
        return pafs.PyFileSystem(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_type_name(self) -> str:
        return self.name

    def normalize_path(self, path: str) -> str:
        return path


class Sink(Handler):
    """Keys and bytes: no directories, no rename. Refuses any call that only filesystems with directories have.

    Attributes:
        objects: What is stored.
        on_open: Called with the path before an upload begins; may raise or wait.
        on_write: Called with the path and the bytes that the upload has so far; may raise or wait.
        quota: Bytes that fit in.
    """

    name = "sink"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.on_open: Callable[[str], None] = lambda path: None
        self.on_write: Callable[[str, int], None] = lambda path, size: None
        self.quota: int | None = None
        self.opened: list[str] = []
        self._lock = threading.Lock()

    def below(self, path: str) -> set[str]:
        """Keys below a path, relative to it."""
        return {key.removeprefix(f"{path}/") for key in self.objects if key.startswith(f"{path}/")}

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        if path in self.objects:
            return pafs.FileInfo(path, pafs.FileType.File, size=len(self.objects[path]))
        return pafs.FileInfo(path, pafs.FileType.Directory if self.below(path) else pafs.FileType.NotFound)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        base, below = selector.base_dir, self.below(selector.base_dir)
        if not below and not selector.allow_not_found:
            raise FileNotFoundError(base)
        names = below if selector.recursive else {key.split("/")[0] for key in below}
        return [self._info(f"{base}/{name}") for name in sorted(names)]

    def delete_file(self, path: str) -> None:
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a flat store has neither directories nor renaming")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = move = copy_file = _refuse
    open_append_stream = _refuse

    def open_input_file(self, path: str) -> pa.NativeFile:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.objects[path])

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        self.on_open(path)
        with self._lock:
            self.opened.append(path)
        return pa.PythonFile(_Upload(self, path), mode="w")

    def check_room(self, path: str, size: int) -> None:
        with self._lock:
            used = sum(len(content) for key, content in self.objects.items() if key != path)
        if self.quota is not None and used + size > self.quota:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class _Upload:
    """Like pyarrow's on S3: closing completes it, also after a failure."""

    def __init__(self, sink: Sink, path: str) -> None:
        self._sink, self._path, self._content, self.closed = sink, path, bytearray(), False

    def write(self, piece: Any) -> int:
        self._sink.on_write(self._path, len(self._content))
        self._sink.check_room(self._path, len(self._content) + len(piece))
        self._content += piece
        return len(piece)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._sink.objects[self._path] = bytes(self._content)

    def writable(self) -> bool:
        return True


def failing(times: int, error: Callable[[], BaseException], match: str = "") -> Callable[..., None]:
    """A hook that raises so many times, on paths that contain `match`."""
    left, lock = [times], threading.Lock()

    def hook(path: str, size: int = 0) -> None:
        with lock:
            if match in path and left[0] > 0:
                left[0] -= 1
                raise error()

    return hook


def files_below(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
