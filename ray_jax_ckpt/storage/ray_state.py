"""Ray's own list of what was reported to it, `<run>/checkpoint_manager_snapshot.json`: read, and made anew."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import pyarrow.fs

from ray_jax_ckpt.errors import StateError
from ray_jax_ckpt.model.metrics import locate, score_of
from ray_jax_ckpt.model.results import Entry, Policy, Status, ranked
from ray_jax_ckpt.storage.files import write_whole
from ray_jax_ckpt.storage.filesystem import describe, join, reading
from ray_jax_ckpt.storage.inventory import found_record, reported_directories
from ray_jax_ckpt.storage.records import MAX_STATE_BYTES, Record, State, parse_state
from ray_jax_ckpt.storage.run_directory import RAY_STATE

logger = logging.getLogger(__name__)


def read_ray_state(filesystem: pyarrow.fs.FileSystem, run_path: str) -> State | None:
    """What Ray lists; None if it has no list.

    Raises:
        StateError: The list is damaged.
        StorageError: It cannot be read.
    """
    path = join(run_path, RAY_STATE)
    with reading(f"Reading {describe(filesystem, path)}"):
        try:
            with filesystem.open_input_stream(path) as stream:
                raw = stream.read(MAX_STATE_BYTES + 1)
        except FileNotFoundError:
            return None
    state = parse_state(raw, describe(filesystem, path))
    if state.driver is not None or b'"ray_version"' not in raw:
        raise StateError(f"{describe(filesystem, path)} is no list of Ray.")
    return state


def listed_by_ray(filesystem: pyarrow.fs.FileSystem, run_path: str) -> frozenset[str]:
    """Paths, relative to the run, of what is Ray's to remove. All that was reported if Ray's list is damaged.

    Raises:
        StorageError, OSError: Storage cannot be read.
    """
    try:
        found = read_ray_state(filesystem, run_path)
    except StateError as error:
        logger.warning("%s All that was reported is left alone.", error)
        return frozenset(reported_directories(filesystem, run_path))
    return frozenset() if found is None else frozenset(record.path for record in found.checkpoints)


def rebuild(
    filesystem: pyarrow.fs.FileSystem, run_path: str, known: Iterable[Record], policy: Policy
) -> list[Record] | None:
    """Makes Ray's list anew if Ray would refuse it: it is damaged, lists what is gone, or a score that is null.

    The old one is kept aside.

    Args:
        filesystem: Where the run is.
        run_path: Its directory.
        known: What else is known of what was reported, such as its metrics.
        policy: Its score, by which Ray keeps the list sorted.

    Returns:
        What it lists now, worst first; None if nothing is wrong with it.
    """
    there = reported_directories(filesystem, run_path)
    try:
        listed = read_ray_state(filesystem, run_path)
        if listed is None:
            return None
        records, index = [r for r in listed.checkpoints if r.path in there], listed.report_index
        if records == list(listed.checkpoints) and not any(_is_unrankable(r, policy) for r in records):
            return None
    except StateError as error:
        logger.warning("%s", error)
        records, index = _found(filesystem, run_path, there, {record.path: record for record in known}), 0
    ages = {record.path: (record.report_index or 0, record.path) for record in records}
    entries = [Entry(r.path, ages[r.path], r.step, Status.COMPLETE, r.metrics) for r in records]
    by_path = {record.path: record for record in records}
    ordered = [by_path[entry.key] for entry in ranked(policy, entries)]
    _replace(filesystem, join(run_path, RAY_STATE), _document(ordered, index, policy.score_attribute))
    return ordered


def _found(
    filesystem: pyarrow.fs.FileSystem, run_path: str, there: Iterable[str], known: dict[str, Record]
) -> list[Record]:
    """Of every directory that is a whole checkpoint, what is known of it, or else what its manifest says."""
    records = []
    for number, path in enumerate(sorted(there)):
        record = found_record(filesystem, run_path, path, "report", whole=True)
        if record is None:
            logger.warning("%s is no finished checkpoint of this package, and is not listed.", join(run_path, path))
            continue
        record = known.get(path, record)
        records.append(record if record.report_index is not None else _numbered(record, number))
    return records


def _numbered(record: Record, number: int) -> Record:
    return record.model_copy(update={"report_index": number})


def _document(ordered: list[Record], index: int, score: str | None) -> dict[str, Any]:
    """In the layout of Ray 2.60."""
    results = {
        r.path: {"version": 0, "checkpoint_dir_name": r.path, "metrics": _for_ray(r.metrics, score)} for r in ordered
    }
    newest = max(ordered, key=lambda record: record.report_index or 0, default=None)
    names = {status: [r.path for r in ordered if r.status is status] for status in Status}
    return {
        "ray_version": importlib.metadata.version("ray"),
        "checkpoint_results": list(results.values()),
        "checkpoint_report_indices": [record.report_index or 0 for record in ordered],
        "latest_checkpoint_result": None if newest is None else results[newest.path],
        "pending_training_results": [results[path] for path in names[Status.VALIDATING]],
        "pending_validation_specs": [r.validation or True for r in ordered if r.status is Status.VALIDATING],
        "current_report_index": max([index, *(1 + (record.report_index or 0) for record in ordered)]),
        "validated_checkpoint_dir_names": names[Status.VALIDATED],
        "timed_out_validation_checkpoint_dir_names": names[Status.VALIDATION_TIMED_OUT],
        "failed_validation_checkpoint_dir_names": names[Status.INVALID],
    }


def _replace(filesystem: pyarrow.fs.FileSystem, path: str, document: dict[str, Any]) -> None:
    kept = path.replace(".json", f".damaged-{time.strftime('%Y%m%d-%H%M%S')}.json")
    with filesystem.open_input_stream(path) as stream:
        write_whole(filesystem, kept, stream.read())
    write_whole(filesystem, path, json.dumps(document).encode())
    logger.warning("%s is made anew; the old one is kept as %s.", describe(filesystem, path), kept)


def _for_ray(metrics: dict[str, Any], score: str | None) -> Any:
    """Metrics that Ray can rank and write: the score is a finite number or missing, others may be null instead."""
    plain = _finite(metrics)
    place = locate(plain, score) if score is not None else None
    if place is not None and score_of(*place) is None:
        del place[0][place[1]]
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_unrankable(record: Record, policy: Policy) -> bool:
    """Whether Ray would fail when it compares it: a null is what it has made of a NaN."""
    name = policy.score_attribute
    return name is not None and locate(record.metrics, name) is not None and score_of(record.metrics, name) is None
