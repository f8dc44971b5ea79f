"""Local disks that misbehave in more ways than `steered` has, as a file says, in whatever process they are used."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import ray
import steered


class Unruly(steered.Steered):
    """What the file says: what `Steered` knows, or

    * "flaky": every third file fails to open, as a store that throttles;
    * "no room for <text>": the disk is full when a file comes whose path has that text;
    * "keeps": nothing may be removed;
    * "removes later", "reads later": such calls wait until the file says something else.
    """

    def __init__(self, control: str) -> None:
        super().__init__(control)
        self._file, self._opened = control, itertools.count(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": itertools.count(1)}

    def _meet(self, path: str) -> None:
        said, opened = Path(self._file).read_text(), next(self._opened)
        if said == "flaky":
            if opened % 3 == 0:
                raise OSError("SlowDown: please reduce your request rate")
        elif said.startswith("no room for "):
            if said.removeprefix("no room for ") in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif said not in ("keeps", "removes later", "reads later"):
            super()._meet(path)

    def _wait_while(self, what: str) -> None:
        while Path(self._file).exists() and Path(self._file).read_text() == what:
            time.sleep(0.05)

    def _removes(self, path: str) -> None:
        if Path(self._file).read_text() == "keeps":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self._wait_while("removes later")

    def delete_dir(self, path: str) -> None:
        self._removes(path)
        super().delete_dir(path)

    def delete_file(self, path: str) -> None:
        if path.endswith("manifest.json"):
            self._removes(path)
        super().delete_file(path)

    def open_input_file(self, path: str) -> Any:
        self._wait_while("reads later")
        return super().open_input_file(path)

    def open_input_stream(self, path: str) -> Any:
        self._wait_while("reads later")
        return super().open_input_stream(path)


class PerNode(steered.Steered):
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
