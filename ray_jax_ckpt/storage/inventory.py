"""What lies in a run's directory, against what its state says of it."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError, NoCheckpointError
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.files import exists
from ray_jax_ckpt.storage.filesystem import describe, directory_names, join, reading
from ray_jax_ckpt.storage.manifest import FOLDER, Manifest
from ray_jax_ckpt.storage.reader import inspect, lacking, read_manifest, some
from ray_jax_ckpt.storage.records import GONE, Origin, Record, State
from ray_jax_ckpt.storage.runs import directories, is_temporary

logger = logging.getLogger(__name__)

REPORTED = re.compile(r"checkpoint_.+")
"""Names that Ray gives to the directories of what is reported."""
_UNFINISHED = (Status.PENDING, Status.FAILED, Status.TIMED_OUT)


def reconciled(
    state: State, filesystem: pyarrow.fs.FileSystem, run_path: str, *, whole: bool
) -> tuple[State, list[str]]:
    """The state without checkpoints that are gone, and with those that it does not know of.

    Args:
        state: What is believed.
        filesystem: Where the run is.
        run_path: Its directory.
        whole: Whether what was reported is looked for as well: the state is not the newest one.

    Returns:
        It, and in words what was different.
    """
    persisted = {path for path in _below(directories(filesystem, run_path), run_path) if not is_temporary(path)}
    reported = reported_directories(filesystem, run_path)
    kept, notes = _without_lost(state.checkpoints, persisted | reported)
    # What was given up may have been finished all the same, by a store that was hanging or had lost its coordinator.
    known = {record.path for record in kept if record.status not in _UNFINISHED} | set(state.removing)
    found = [found_record(filesystem, run_path, path, "persist") for path in sorted(persisted - known)]
    # Their names hold the time.
    reports = [found_record(filesystem, run_path, path, "report") for path in sorted(reported - known) if whole]
    numbers = itertools.count(state.report_index)
    added = [one for one in found if one is not None]
    added += [one.model_copy(update={"report_index": next(numbers)}) for one in reports if one is not None]
    index = next(numbers)
    if added:
        notes.append(f"It did not list {len(added)} checkpoints that are there: {some(r.path for r in added)}")
    ready = {record.path for record in added}
    checkpoints = (*(record for record in kept if record.path not in ready), *added)
    return state.changed(checkpoints=checkpoints, report_index=index), notes


def with_unremoved(state: State, filesystem: pyarrow.fs.FileSystem, run_path: str) -> State:
    """The state, with what was to be removed and is whole still listed again: nobody removes it any more.

    For who takes over from one that has ended. His own rules say what is superfluous.
    """
    found = [found_record(filesystem, run_path, path, "persist", whole=True) for path in state.removing]
    return state.changed(removing=(), checkpoints=(*state.checkpoints, *(one for one in found if one is not None)))


def record_of(manifest: Manifest, path: str, origin: Origin) -> Record:
    """What a manifest says of the checkpoint at a path that is relative to its run."""
    return Record(
        path=path,
        generation=str(manifest.generation),
        step=manifest.step,
        origin=origin,
        metrics=dict(manifest.metrics.get(0, {})),
        created_at_s=manifest.created_at_s,
        num_bytes=sum(file.size for file in manifest.files.values()),
    )


def found_record(
    filesystem: pyarrow.fs.FileSystem, run_path: str, path: str, origin: Origin, *, whole: bool = False
) -> Record | None:
    """What the checkpoint at a path says of itself; None if there is none of this package that is finished.

    Args:
        filesystem: Where the run is.
        run_path: Its directory.
        path: Relative to it.
        origin: Who wrote it.
        whole: Whether its files are looked for too, beside its manifest.
    """
    where = join(run_path, path)
    try:
        manifest = read_manifest(filesystem, where)
        missing = lacking(filesystem, where, manifest) if whole else []
    except NoCheckpointError:
        logger.debug("%s is unfinished, or none of this package.", path)
        return None
    except CheckpointError as error:
        logger.warning("Passed over the checkpoint %s: %s", path, error)
        return None
    if missing:
        logger.warning("Passed over the checkpoint %s: it lacks %s.", path, some(missing))
    return None if missing else record_of(manifest, path, origin)


def problem_of(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Why what lies at a path cannot be restored, as far as a listing tells; "" if nothing speaks against it.

    A directory that is none of this package's is taken as it is.

    Raises:
        StorageError, RestoreTimeoutError: Storage cannot be read.
    """
    with reading(f"Looking at {describe(filesystem, path)}"):
        if not exists(filesystem, path):
            return GONE
        if not exists(filesystem, join(path, FOLDER)):
            return ""
    return inspect(filesystem, path)[0]


def _without_lost(records: Iterable[Record], there: set[str]) -> tuple[list[Record], list[str]]:
    """Records of what is there; those of what never was stay, since they say what happened."""
    listed = [record for record in records if record.status.is_restorable]
    lost = [record for record in listed if record.path not in there]
    if not lost:
        return list(records), []
    if len(lost) == len(listed) and not there:
        # To go on without any would start the run afresh, and no failure says so louder than one that is missed.
        return list(records), [
            f"None of the {len(lost)} checkpoints that it lists is there. They stay listed: is this the storage that "
            "the run wrote to?"
        ]
    gone = {record.path for record in lost}
    note = f"{len(lost)} checkpoints that it lists are gone and no longer listed: {some(sorted(gone))}"
    return [record for record in records if record.path not in gone], [note]


def reported_directories(filesystem: pyarrow.fs.FileSystem, run_path: str) -> set[str]:
    """Names of the directories that Ray has made for what was reported to it, finished or not. Raises OSError."""
    return {name for name in directory_names(filesystem, run_path) if REPORTED.fullmatch(name)}


def _below(paths: Iterable[str], run_path: str) -> Iterable[str]:
    # Some filesystems begin what they list with a slash, whatever they are asked for.
    prefix = run_path.strip("/") + "/"
    return (path.lstrip("/").removeprefix(prefix) for path in paths)
