"""A snapshot in memory as the files of a checkpoint: a rank's share of them, or all."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ray_jax_ckpt.digest import Digester
from ray_jax_ckpt.errors import NotSupportedError, SnapshotLostError
from ray_jax_ckpt.memory.messages import Survey
from ray_jax_ckpt.memory.reader import Reader
from ray_jax_ckpt.model.index import Index, Item
from ray_jax_ckpt.model.recovery import NotHeldError, Stored, Want
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import MANIFEST, FileRecord
from ray_jax_ckpt.storage.plan import About, DirectoryPlan, PlannedFile, orbax_of, plan_files

if TYPE_CHECKING:
    from ray_jax_ckpt.session import Session


class Share:
    """Files of one generation. Thread-safe; nothing is asked for before the first call.

    All ranks plan the same checkpoint, so that what they write each for itself fits together. Rank 0's share has the
    manifest.

    Args:
        session: This rank's.
        generation: Which.
        whole: All files instead of this rank's.
    """

    def __init__(self, session: Session, generation: Generation, *, whole: bool) -> None:
        self._session, self._generation, self._whole = session, generation, whole
        self._lock = threading.RLock()

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by path in the checkpoint.

        Raises:
            SnapshotError: The snapshot did not become complete.
            SnapshotLostError: It is not held any more.
        """
        with self._lock:
            return {path: file.size for path, file in self._files.items()}

    def read(self, path: str) -> np.ndarray:
        """A file's bytes: of this node's memory without a copy, where they lie there in one piece. Raises KeyError."""
        with self._lock:
            return self._bytes_of(self._files[path])

    # What there is.

    @cached_property
    def _survey(self) -> Survey:
        return self._session.survey(self._generation)

    @cached_property
    def _plan(self) -> DirectoryPlan:
        survey = self._survey
        indices = [Index.from_bytes(raw) for raw in survey.located.indices]
        if not any(index.layout.orbax for index in indices):
            raise NotSupportedError(
                f"The snapshot of step {self._generation.step} cannot be written as a checkpoint. Take snapshots that "
                "are to be reported with force=True; if it was, Orbax cannot hold its state, as rank 0's log says."
            )
        about = About(run=survey.run, step=self._generation.step, created_at_s=survey.created_at_s)
        # As plain files, however many there are: Ray copies files.
        return plan_files(indices, orbax_of(indices), about)

    @cached_property
    def _files(self) -> Mapping[str, PlannedFile]:
        rank = self._session.rank
        planned = self._plan.files if self._whole else self._plan.of(rank)
        files = {file.path: file for file in planned}
        if self._whole or rank == 0:
            files[MANIFEST] = self._manifest()
        return files

    def _manifest(self) -> PlannedFile:
        """With the digests of what was captured; those of files that were put together are made here."""
        records = {file.path: self._record(file) for file in self._plan.files}
        content = self._plan.manifest(records).to_bytes()
        return PlannedFile(MANIFEST, len(content), "", content=content)

    def _record(self, file: PlannedFile) -> FileRecord:
        found = file.digest
        if not found:
            digester = Digester()
            digester.update(self._bytes_of(file))
            found = digester.result()
        return FileRecord(size=file.size, digest=found)

    # Bytes.

    @cached_property
    def _reader(self) -> Reader:
        session, located = self._session, self._survey.located
        return Reader(
            located,
            session.node_id,
            session.decision.secret,
            verify=session.config.verify,
            timeout_s=session.config.timeout_s,
            seat=session.rank,
            streams=session.config.streams,
            tls=session.tls,
        )

    def _bytes_of(self, file: PlannedFile) -> np.ndarray:
        if file.content is not None:
            return np.frombuffer(file.content, np.uint8)
        pieces = [piece.cut(self._piece(piece.part, piece.offset, piece.num_bytes)) for piece in file.pieces]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _piece(self, part: str, offset: int, num_bytes: int) -> np.ndarray:
        box = ((0, num_bytes),)
        want = Want(box, [Stored(part, Item(-1, box, offset, num_bytes), "")], 1)
        try:
            (found,) = self._reader.fetch([want], [np.dtype(np.uint8)])
        except NotHeldError:
            raise SnapshotLostError(
                f"Step {self._generation.step}: no living store holds {part} any more. Take snapshots that are to be "
                "reported with force=True, which keeps them until they are written."
            ) from None
        # The reader uses other memory than that of this node's stores again.
        return found if not self._reader.used_peers else found.copy()
