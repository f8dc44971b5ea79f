"""Temporary directories that do not outlive the process that made them by much, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from ray_jax_ckpt.system import process_alive, process_start_time

_NAME = re.compile(r"rjc-data-(\d+)-(\d+)-\w+")


def make_scratch() -> Path:
    """A new empty directory, to be removed by the caller. What killed processes have left is removed first."""
    sweep_scratch()
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"rjc-data-{pid}-{process_start_time(pid)}-"))


def sweep_scratch() -> None:
    """Removes the directories of processes that do not exist any more: SIGKILL lets nobody clean up."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            owner = _NAME.fullmatch(entry.name)
            if owner and not process_alive(int(owner[1]), int(owner[2])):
                shutil.rmtree(entry.path, ignore_errors=True)
