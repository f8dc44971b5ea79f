"""A local disk that does what a file says, in whatever process it is used."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs


class Steered(pafs.FileSystemHandler):
    """Delegates to the local disk, unless `control` says otherwise when something is to be written.

    Args:
        control: Path of a file that says how it is: "" fine, "full", "denied", "held" until there is a file beside it
            that is called "released", "silent" for what cannot be listed, or seconds that each file takes longer.
        pardoned: Whether access is never denied to it.
    """

    def __init__(self, control: str, *, pardoned: bool = False) -> None:
        self._control, self._pardoned, self._local = control, pardoned, pafs.LocalFileSystem()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steered) and other._control == self._control

    def get_type_name(self) -> str:
        return "steered"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        if Path(self._control).read_text() == "silent":
            raise OSError(errno.EIO, os.strerror(errno.EIO), selector.base_dir)
        return self._local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._meet(path)
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._local.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._local.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._local.copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._meet(path)
        return self._local.open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def _meet(self, path: str) -> None:
        # The run's own log is not what is tried out.
        said = "" if path.endswith(("events.jsonl", "/ray_jax_ckpt")) else Path(self._control).read_text()
        if said == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if said == "denied" and not self._pardoned:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if said == "held":
            while not Path(self._control).with_name("released").exists():
                time.sleep(0.05)
        elif said not in ("", "denied", "silent"):
            time.sleep(float(said))


def pardoned(control: str) -> pafs.FileSystem:
    """With credentials of today."""
    return pafs.PyFileSystem(Steered(control, pardoned=True))
