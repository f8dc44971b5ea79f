"""Filesystems that are not the local one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs


class ObjectStore(pafs.FileSystemHandler):
    """Objects by key: no directories, no rename, no append.

    Attributes:
        objects: Their bytes.
        read: What was read: (key, first byte, size) each.
        before_read: Called with (key, first byte) before each read; may raise or wait.
    """

    def __init__(self, directory: Path | None = None, prefix: str = "bucket") -> None:
        self.objects: dict[str, bytes] = {}
        self.read: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str, int], None] = lambda key, start: None
        self._lock = threading.Lock()
        if directory is not None:
            for file in directory.rglob("*"):
                if file.is_file():
                    self.objects[f"{prefix}/{file.relative_to(directory)}"] = file.read_bytes()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_type_name(self) -> str:
        return "objects"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        if path in self.objects:
            return pafs.FileInfo(path, pafs.FileType.File, size=len(self.objects[path]))
        # Object stores only know of keys that begin so.
        below = any(key.startswith(f"{path.rstrip('/')}/") for key in self.objects)
        return pafs.FileInfo(path, pafs.FileType.Directory if below else pafs.FileType.NotFound)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        base = f"{selector.base_dir.rstrip('/')}/"
        below = [key for key in self.objects if key.startswith(base)]
        if not below and not selector.allow_not_found:
            raise FileNotFoundError(selector.base_dir)
        if selector.recursive:
            return [self._info(key) for key in below]
        return [self._info(base + name) for name in sorted({key.removeprefix(base).split("/")[0] for key in below})]

    def create_dir(self, path: str, recursive: bool) -> None:
        pass

    def delete_dir(self, path: str) -> None:
        for key in [key for key in self.objects if key.startswith(f"{path.rstrip('/')}/")]:
            del self.objects[key]

    delete_dir_contents = delete_dir

    def delete_root_dir_contents(self) -> None:
        self.objects.clear()

    def delete_file(self, path: str) -> None:
        del self.objects[path]

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError("no rename")

    def copy_file(self, src: str, dest: str) -> None:
        self.objects[dest] = self.objects[src]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.PythonFile(_Object(self, path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self, path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError("no append")

    def note(self, key: str, start: int, size: int) -> None:
        with self._lock:
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
        self._at = {0: 0, 1: self._at, 2: len(self._store.objects[self._key])}[whence] + offset
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


class _Upload:
    """An object appears when it is closed, as a whole."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key, self._parts, self.closed = store, key, [], False

    def write(self, piece: Any) -> int:
        self._parts.append(bytes(piece))
        return len(self._parts[-1])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._store.objects[self._key] = b"".join(self._parts)

    def writable(self) -> bool:
        return True
