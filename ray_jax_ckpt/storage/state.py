"""A run's state as it lies on storage: `<run>/ray_jax_ckpt/state.json`, with the one before beside it.

Whoever reads it changes nothing. What is damaged is kept aside by the next one who writes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Literal

import pyarrow.fs

from ray_jax_ckpt.errors import StaleDriverError, StateError
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.chronicle import with_rays_list
from ray_jax_ckpt.storage.files import ASIDE, remove_file, write_whole
from ray_jax_ckpt.storage.filesystem import describe, join, reading
from ray_jax_ckpt.storage.inventory import found_record, reconciled
from ray_jax_ckpt.storage.manifest import FOLDER
from ray_jax_ckpt.storage.ray_state import read_ray_state
from ray_jax_ckpt.storage.records import (
    GONE,
    MAX_STATE_BYTES,
    VERSION,
    AttemptRecord,
    Driver,
    Record,
    State,
    parse_state,
)
from ray_jax_ckpt.storage.run_directory import PREVIOUS, STATE

__all__ = [
    "PREVIOUS",
    "STATE",
    "VERSION",
    "AttemptRecord",
    "Driver",
    "Loaded",
    "Record",
    "State",
    "StateFile",
    "current_state",
    "parse_state",
]

logger = logging.getLogger(__name__)

_ASIDE_AGE_S = 60.0


@dataclass(frozen=True)
class Loaded:
    """A state, and where it comes from.

    Attributes:
        state: As it counts now: without checkpoints that are gone, with those that it did not know of.
        found: "state": the file. "previous": the one before, since the file could not be used. "rebuilt": neither, and
            the checkpoints told what there is. "none": nothing is there.
        warning: What was not as it should be; "" if all was.
        lost: What it listed, and is gone.
    """

    state: State
    found: Literal["state", "previous", "rebuilt", "none"]
    warning: str = ""
    lost: tuple[Record, ...] = ()


class StateFile:
    """Reads and writes the state of one run. Blocks on storage: for threads that may wait.

    Args:
        filesystem: Where the run is.
        run_path: Its directory.
        yields: Whether what somebody else writes after it was loaded here stays, whoever that is.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, run_path: str, *, yields: bool = False) -> None:
        self.filesystem, self.run_path = filesystem, run_path.rstrip("/") or run_path
        self._yields, self._tidied = yields, False
        # As it was read or found, and as it was to be written last: that may or may not have come through if it failed.
        self._known: tuple[bytes | None, bytes | None] = None, None

    def load(self) -> Loaded:
        """The run's state, with its warning logged. Changes nothing on storage.

        A state that is damaged, empty or missing is made up for by the one before, or by Ray's list of what was
        reported, and by the manifests of the checkpoints that are there; so is one that does not list all of them, or
        lists some that are gone.

        Raises:
            NotSupportedError: A newer version of this package wrote it.
            StorageError: Storage cannot be read. That says nothing of what is there.
        """
        problems: list[str] = []
        known, found = self._read_one_of(problems)
        with reading(f"Looking at the checkpoints of {self._says('')}"):
            state, notes = reconciled(known, self.filesystem, self.run_path, whole=found != "state")
        if found == "rebuilt" and not problems and not state.checkpoints:
            return Loaded(state, "none")
        if found == "rebuilt":
            if not problems:
                problems.append(f"{STATE} and {PREVIOUS} are both missing")
            problems.append(f"It is made anew from {len(state.checkpoints)} checkpoints that are there")
        warning = ". ".join(text.rstrip(".") for text in [*problems, *notes])
        if warning:
            logger.warning("State of the run %s: %s.", self._says(""), warning)
        listed = {record.path for record in state.checkpoints}
        return Loaded(state, found, warning, tuple(one for one in known.checkpoints if one.path not in listed))

    def save(self, state: State) -> None:
        """Writes it, and keeps the one that was there beside it. A damaged one is kept too, under a name of its own.

        Raises:
            StaleDriverError: A newer driver has taken the run over, or anybody has written it and this one `yields`:
                theirs stays.
            NotSupportedError: What is there was written by a newer version of this package, and stays.
            OSError: Storage did not take it; what was there is there still.
        """
        self._tidy()
        current = self._read(STATE)
        if current is not None:
            self._put_by(current, state)
        raw = state.to_bytes()
        self._known = current, raw
        write_whole(self.filesystem, join(self.run_path, STATE), raw)

    def _read_one_of(self, problems: list[str]) -> tuple[State, Literal["state", "previous", "rebuilt"]]:
        candidates: list[tuple[str, Literal["state", "previous"]]] = [(STATE, "state"), (PREVIOUS, "previous")]
        for name, found in candidates:
            raw = self._read(name)
            if name == STATE:
                self._known = raw, self._known[1]
            if raw is None:
                continue
            try:
                state = parse_state(raw, self._says(name))
            except StateError as error:
                problems.append(str(error))
                continue
            if found == "previous":
                problems.append(f"{self._says(STATE)} cannot be used, so the one before it, {name}, counts")
            return state, found
        return self._of_ray(problems).changed(run=self.run_path.rpartition("/")[2]), "rebuilt"

    def _of_ray(self, problems: list[str]) -> State:
        """What Ray lists: the run may have begun without this package."""
        try:
            return read_ray_state(self.filesystem, self.run_path) or State()
        except StateError as error:
            problems.append(str(error))
            return State()

    def _put_by(self, current: bytes, state: State) -> None:
        where = self._says(STATE)
        try:
            found = parse_state(current, where)
        except StateError as error:
            kept = f"{FOLDER}/state.damaged-{time.strftime('%Y%m%d-%H%M%S')}.json"
            write_whole(self.filesystem, join(self.run_path, kept), current)
            logger.warning("%s It is kept as %s.", error, self._says(kept))
            return
        if self._yields and current not in self._known:
            raise StaleDriverError(
                f"{where} was written by somebody else, {_named(found.driver)}, after it was read here: two write "
                "the books of one run. Theirs stay, and what is registered here from now on is not kept."
            )
        self._fence(found.driver, state.driver, where)
        write_whole(self.filesystem, join(self.run_path, PREVIOUS), current)

    @staticmethod
    def _fence(found: Driver | None, own: Driver | None, where: str) -> None:
        if found is None or (own is not None and found.id == own.id):
            return
        if own is None or found.started_at_s >= own.started_at_s:
            raise StaleDriverError(
                f"{where} belongs to {_named(found)}, "
                f"which has taken the run over; {'nobody' if own is None else own.id} writes it no more. End this run "
                "if it still trains."
            )

    def _read(self, name: str) -> bytes | None:
        path = join(self.run_path, name)
        with reading(f"Reading {self._says(name)}"):
            try:
                with self.filesystem.open_input_stream(path) as stream:
                    return stream.read(MAX_STATE_BYTES + 1)
            except FileNotFoundError:
                return None

    def _tidy(self) -> None:
        """Removes what writers left that were killed, once."""
        if self._tidied:
            return
        self._tidied = True
        selector = pyarrow.fs.FileSelector(join(self.run_path, FOLDER), allow_not_found=True)
        for info in self.filesystem.get_file_info(selector):
            is_old = info.mtime_ns is not None and time.time() - info.mtime_ns / 1e9 > _ASIDE_AGE_S
            if info.path.endswith(ASIDE) and is_old:
                remove_file(self.filesystem, info.path)

    def _says(self, name: str) -> str:
        return describe(self.filesystem, join(self.run_path, name) if name else self.run_path)


def _named(driver: Driver | None) -> str:
    if driver is None:
        return "no driver"
    return f"the driver {driver.id} (process {driver.pid} on {driver.host or 'an unknown host'})"


def current_state(filesystem: pyarrow.fs.FileSystem, run_path: str) -> State:
    """The state as it counts now: with what is there, and with what Ray has done since with what was reported.

    What it listed and is gone is in it as lost, unless Ray has removed it.

    Raises:
        NotSupportedError, StorageError: See `StateFile.load`.
    """
    loaded = StateFile(filesystem, run_path).load()
    lost = [one.model_copy(update={"status": Status.LOST, "reason": GONE}) for one in loaded.lost]
    state = loaded.state.changed(checkpoints=(*loaded.state.checkpoints, *lost))
    try:
        listed = read_ray_state(filesystem, run_path)
    except StateError as error:
        logger.warning("%s", error)
        return state
    if listed is None:
        return state
    new = {one.path for one in listed.checkpoints} - {one.path for one in state.checkpoints if one.generation}
    records = {path: found_record(filesystem, run_path, path, "report") for path in sorted(new)}
    return with_rays_list(state, listed, {path: record for path, record in records.items() if record is not None})
