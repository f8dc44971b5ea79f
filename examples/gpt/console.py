"""One status line per event for the user; everything else that this process prints goes to a log."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO


class Console:
    """Context manager: inside, only `say` reaches the terminal, unless `verbose`.

    File descriptors 1 and 2 are redirected, not `sys.stdout`: Ray's C++ code and the processes it starts write to them.
    """

    def __init__(self, log: Path, *, verbose: bool = False) -> None:
        self.log, self._verbose = log, verbose
        self._begun = time.monotonic()
        self._terminal: IO[str] = sys.stdout
        self._saved: list[int] = []

    def __enter__(self) -> Console:
        if self._verbose:
            return self
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        self._terminal = os.fdopen(os.dup(1), "w", buffering=1)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._verbose:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        self._terminal.close()
        self._terminal, self._saved = sys.stdout, []

    def say(self, text: str) -> None:
        """Prints one status line with the seconds since the start."""
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", file=self._terminal, flush=True)

    def show(self, text: str) -> None:
        """Prints text as it is."""
        print(text, file=self._terminal, flush=True)
