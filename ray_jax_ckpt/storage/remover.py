"""Removes checkpoints in the background, once nothing that is on storage names them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import pyarrow.fs

from ray_jax_ckpt.storage.files import remove_tree
from ray_jax_ckpt.storage.filesystem import describe, join
from ray_jax_ckpt.storage.manifest import MANIFEST

logger = logging.getLogger(__name__)

TRIES = 5
FIRST_PAUSE_S = 1.0


class Remover:
    """Thread-safe; never raises, never blocks. Its thread lives while there is work.

    Args:
        filesystem: Where the run is.
        run_path: Its directory.
        spared: Says which paths are somebody else's to remove. Asked before each removal.
        removed: Told, in the remover's thread, of each path that is gone, or that is spared.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        run_path: str,
        spared: Callable[[], Collection[str]],
        removed: Callable[[str], None],
    ) -> None:
        self._filesystem, self._run_path, self._spared, self._removed = filesystem, run_path, spared, removed
        self._todo: queue.SimpleQueue[tuple[Sequence[str], Future[None]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0

    def remove(self, paths: Sequence[str], after: Future[None]) -> None:
        """Has directories removed when the state that does not name them is on storage, and never if it will not be.

        Args:
            paths: Relative to the run.
            after: Done when that state, or a later one, is there.
        """
        if not paths:
            return
        with self._changed:
            self._pending += 1
            self._todo.put((paths, after))
            if self._pending == 1:
                threading.Thread(target=self._run, name="rjc-remove", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Waits until all that was asked for is tried, at most so long. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def _run(self) -> None:
        pending = True
        while pending:
            paths, after = self._todo.get()
            try:
                after.result()
                for path in paths:
                    self._remove(path)
            except Exception as error:
                logger.warning("%s: not removed, since no state without it is on storage: %s", ", ".join(paths), error)
            with self._changed:
                self._pending -= 1
                pending = self._pending > 0
                self._changed.notify_all()

    def _remove(self, path: str) -> None:
        where = join(self._run_path, path)
        for attempt in range(TRIES):
            try:
                if path in self._spared():
                    logger.info("%s is left to Ray, which lists it.", where)
                else:
                    remove_tree(self._filesystem, where, first=MANIFEST)
                    logger.info("Removed the checkpoint %s, which is superfluous.", describe(self._filesystem, where))
                self._removed(path)
                return
            except Exception as error:
                # Filesystems of users raise what they like.
                logger.warning("%s could not be removed (try %d of %d): %s", where, attempt + 1, TRIES, error)
            time.sleep(FIRST_PAUSE_S * 2**attempt if attempt + 1 < TRIES else 0.0)
        logger.warning("%s is superfluous and stays: it could not be removed. The next driver tries again.", where)
