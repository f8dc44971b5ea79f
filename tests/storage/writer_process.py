"""Writes a pickled checkpoint as a store does, without JAX, and kills itself on the way.

Called as `writer_process.py PICKLE PATH KIND MOMENT`.
"""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs

from ray_jax_ckpt.storage import writer
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST
from ray_jax_ckpt.storage.writer import Effort, Target, write_files

assert not {"jax", "orbax", "flax", "ray"} & set(sys.modules)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """A stream that dies when half of what it gets is on the disk."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, content: Any) -> None:
        self._stream.write(content[: len(content) // 2])
        self._stream.flush()
        die()


def arm(moment: str) -> None:
    """Has the process die at a moment of a write."""
    opened, renamed = writer.open_output, Target._rename

    def open_output(filesystem: Any, path: str) -> Any:
        if moment == "first" or (moment == "manifest" and path.endswith(MANIFEST)):
            die()
        if moment == "data half" and f"/{FOLDER}/" in path:
            # Whatever is under way at the same time gets ahead.
            time.sleep(0.3)
        stream = opened(filesystem, path)
        half = {"data half": "w/c/0", "manifest half": MANIFEST}.get(moment)
        return Dying(stream) if half and path.endswith(half) else stream

    def rename(target: Target) -> None:
        if moment == "rename":
            die()
        renamed(target)

    writer.open_output, Target._rename = open_output, rename


def main(pickled: str, path: str, kind: str, moment: str) -> None:
    held = pickle.loads(Path(pickled).read_bytes())
    if moment == "too large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    else:
        arm(moment)
    files = pafs.LocalFileSystem()
    if kind == "no rename":
        files = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("local")))
    target, effort = Target(files, path), Effort(streams=1, timeout_s=30)
    target.prepare()
    try:
        records = write_files(
            target, held["plan"].files, lambda part, at, size: held["parts"][part][at : at + size], effort
        )
    except OSError as error:
        if os.strerror(errno.EFBIG) in str(error) and "tried 1 times" in str(error):
            sys.exit(3)
        raise
    target.commit(held["plan"].manifest(records), effort)


if __name__ == "__main__":
    main(*sys.argv[1:])
