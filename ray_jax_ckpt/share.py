"""A snapshot in memory as the files of a checkpoint: a rank's share of them, or all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
from ray_jax_ckpt.storage.ocdbt import pack_database
from ray_jax_ckpt.storage.plan import (
    About,
    DirectoryPlan,
    PlannedFile,
    for_database,
    needs_database,
    orbax_of,
    plan_files,
)

if TYPE_CHECKING:
    from ray_jax_ckpt.session import Session

MAX_DATABASE_BYTES = 256 << 20
"""What rank 0 copies to put very many arrays into few files. Larger states stay plain files, which take no copy."""

Place = tuple[str, int, int]


class Share:
    """Files of one generation. Thread-safe; nothing is asked for before the first call.

    All ranks plan the same checkpoint, so that what they write each for itself fits together. Rank 0's share has the
    manifest, and the database if there is one.

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
        orbax = orbax_of(indices)
        if needs_database(indices):
            plan = plan_files(indices, for_database(orbax), about)
            if sum(file.size for file in plan.files if file.in_database) <= MAX_DATABASE_BYTES:
                return plan
        return plan_files(indices, orbax, about)

    @cached_property
    def _files(self) -> Mapping[str, PlannedFile]:
        rank, files = self._session.rank, [file for file in self._plan.files if not file.in_database]
        if not self._whole and rank:
            return {file.path: file for file in files if file.writer == rank}
        # Of a database nobody knows the files before they are made, so there is one, of one process.
        database = self._database()
        manifest = self._manifest([*files, *database])
        own = [file for file in files if self._whole or file.writer == rank]
        return {file.path: file for file in [*own, *database, manifest]}

    def _database(self) -> list[PlannedFile]:
        entries = [file for file in self._plan.files if file.in_database]
        places = list({(piece.part, piece.offset, piece.num_bytes) for entry in entries for piece in entry.pieces})
        found = dict(zip(places, self._fetch(places), strict=True))
        return pack_database(entries, lambda *place: found[place]) if entries else []

    def _manifest(self, files: Sequence[PlannedFile]) -> PlannedFile:
        """With the digests of what was captured; those of files that were put together are made here."""
        records = {file.path: self._record(file) for file in files}
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
        (found,) = self._fetch([(part, offset, num_bytes)])
        # The reader uses other memory than that of this node's stores again.
        return found if not self._reader.used_peers else found.copy()

    def _fetch(self, places: Sequence[Place]) -> list[np.ndarray]:
        """Bytes at places of parts, valid until the next call."""
        wants = []
        for part, offset, num_bytes in places:
            box = ((0, num_bytes),)
            wants.append(Want(box, [Stored(part, Item(-1, box, offset, num_bytes), "")], 1))
        try:
            return self._reader.fetch(wants, [np.dtype(np.uint8)] * len(wants))
        except NotHeldError as error:
            raise SnapshotLostError(
                f"Step {self._generation.step}: no living store holds {', '.join(error.parts)} any more. Take "
                "snapshots that are to be reported with force=True, which keeps them until they are written."
            ) from None
