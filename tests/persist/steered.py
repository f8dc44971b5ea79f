"""Local disks that do what a file says, or that are not the same on all nodes, in whatever process they are used."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import ray


class Steered(pafs.FileSystemHandler):
    """Delegates to the local disk, unless `control` says otherwise.

    Args:
        control: Path of a file that says how it is: "" fine; "full"; "denied"; "held" until there is a file beside it
            that is called "released"; "held at <text>" while it says so, for files whose path has that text, with a
            file beside it that is called "met"; "flaky": every third file fails; "silent" for what cannot be listed;
            "keeps" what is to be removed; "removes later", "reads later": such calls wait while it says so; or seconds
            that each file takes longer.
        pardoned: Whether access is never denied to it.
    """

    def __init__(self, control: str, *, pardoned: bool = False) -> None:
        self._control, self._pardoned, self._local = control, pardoned, pafs.LocalFileSystem()
        self._opened = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steered) and other._control == self._control

    def get_type_name(self) -> str:
        return "steered"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        if self._said() == "silent":
            raise OSError(errno.EIO, os.strerror(errno.EIO), selector.base_dir)
        return self._local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._meet(path)
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._removes(path)
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        if path.endswith("manifest.json"):
            self._removes(path)
        self._local.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._local.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._local.copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        self._wait_while("reads later")
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        self._wait_while("reads later")
        return self._local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._meet(path)
        return self._local.open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def _meet(self, path: str) -> None:
        # The run's own log is not what is tried out.
        said = "" if path.endswith(("events.jsonl", "/ray_jax_ckpt")) else self._said()
        if said == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if said == "denied" and not self._pardoned:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if said == "held":
            while not Path(self._control).with_name("released").exists():
                time.sleep(0.05)
        elif said == "flaky":
            self._opened += 1
            if self._opened % 3 == 0:
                raise OSError("SlowDown: please reduce your request rate")
        elif said.startswith("held at "):
            if said.removeprefix("held at ") in path:
                Path(self._control).with_name("met").touch()
                self._wait_while(said)
        elif said and said[0].isdigit():
            time.sleep(float(said))

    def _removes(self, path: str) -> None:
        if self._said() == "keeps":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self._wait_while("removes later")

    def _said(self) -> str:
        # It may have gone with its test, which those that are still here do not wait for.
        return Path(self._control).read_text() if Path(self._control).exists() else ""

    def _wait_while(self, what: str) -> None:
        while self._said() == what:
            time.sleep(0.05)


class PerNode(Steered):
    """A disk of each node's own where checkpoints are to go."""

    def _own(self, path: str) -> str:
        node = ray.get_runtime_context().get_node_id()[:8]
        return path.replace("/checkpoints", f"/checkpoints of {node}")

    def get_file_info(self, paths: list[str]) -> Any:
        return super().get_file_info([self._own(path) for path in paths])

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        own = pafs.FileSelector(self._own(selector.base_dir), selector.allow_not_found, selector.recursive)
        return super().get_file_info_selector(own)

    def create_dir(self, path: str, recursive: bool) -> None:
        super().create_dir(self._own(path), recursive)

    def delete_file(self, path: str) -> None:
        super().delete_file(self._own(path))

    def delete_dir(self, path: str) -> None:
        super().delete_dir(self._own(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return super().open_output_stream(self._own(path), metadata)

    def open_input_stream(self, path: str) -> Any:
        return super().open_input_stream(self._own(path))

    def open_input_file(self, path: str) -> Any:
        return super().open_input_file(self._own(path))


def pardoned(control: str) -> pafs.FileSystem:
    """With credentials of today."""
    return pafs.PyFileSystem(Steered(control, pardoned=True))
