"""Overwrites a checkpoint again and again, each time in a process that is killed one change of the storage later.

Called as `replacing_process.py OLD FOLDER`. OLD holds a checkpoint, FOLDER gets a copy of it for each kill: `rename/0`,
`rename/1` and so on, and `no rename/0` and so on.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

import ray_jax_ckpt as rjc
from ray_jax_ckpt.storage import saving, spares, writer
from ray_jax_ckpt.storage.writer import Effort

NEW = {"w": np.arange(50), "new": np.ones(3)}


class Dying(pafs.FileSystemHandler):
    """A local disk whose user is killed just before a change of it, or in the middle of some files."""

    def __init__(self, num_changes: int) -> None:
        self._left = num_changes
        self._disk = pafs.LocalFileSystem()
        self.get_file_info, self.get_file_info_selector = self._disk.get_file_info, self._disk.get_file_info
        self.open_input_stream, self.open_input_file = self._disk.open_input_stream, self._disk.open_input_file

    def get_type_name(self) -> str:
        return "dying"

    def normalize_path(self, path: str) -> str:
        return path

    def change(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.change()
        stream = self._disk.open_output_stream(path)
        return pa.PythonFile(_Dying(self, stream), mode="w") if path.endswith(("manifest.json", "w/c/0")) else stream

    def delete_file(self, path: str) -> None:
        self.change()
        self._disk.delete_file(path)

    def delete_dir(self, path: str) -> None:
        # One file after the other, as a disk does it too.
        for file in sorted(Path(path).rglob("*")):
            if file.is_file():
                self.delete_file(str(file))
        self._disk.delete_dir(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._disk.create_dir(path, recursive=recursive)

    def move(self, source: str, target: str) -> None:
        self.change()
        self._disk.move(source, target)

    def _no(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    open_append_stream = copy_file = delete_dir_contents = delete_root_dir_contents = _no
    get_file_info = get_file_info_selector = open_input_stream = open_input_file = _no


class _Dying:
    closed = False

    def __init__(self, disk: Dying, stream: Any) -> None:
        self._disk, self._stream = disk, stream

    def write(self, content: Any) -> None:
        self._stream.write(content[: len(content) // 2])
        self._stream.flush()
        self._disk.change()
        self._stream.write(content[len(content) // 2 :])

    def flush(self) -> None:
        self._stream.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._stream.close()


def overwrite(directory: Path, num_changes: int) -> None:
    handler = rjc.OrbaxCheckpointHandler()
    handler._effort = Effort(streams=1, retries=0)
    handler.save((str(directory), pafs.PyFileSystem(Dying(num_changes))), NEW, step=7, overwrite=True)


def kill_everywhere(old: Path, folder: Path, how: str) -> None:
    for module in (saving, spares, writer):
        module.renames = lambda filesystem: how == "rename"
    writer._SMALL_PER_STREAM = 1
    for number in range(1000):
        directory = folder / str(number)
        shutil.copytree(old, directory)
        child = os.fork()
        if not child:
            try:
                overwrite(directory, number)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        if not os.WIFSIGNALED(status):
            sys.exit(1)


if __name__ == "__main__":
    for how in ("rename", "no rename"):
        kill_everywhere(Path(sys.argv[1]), Path(sys.argv[2]) / how, how)
