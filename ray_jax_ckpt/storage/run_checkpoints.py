"""The checkpoints of a run by age, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.fs

from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.filesystem import join
from ray_jax_ckpt.storage.records import Record
from ray_jax_ckpt.storage.state import current_state


def by_age(records: Iterable[Record]) -> list[Record]:
    """Oldest first. What does not say which snapshot it is comes first: others' checkpoints count less than ours.

    What is lost is where it was: beside what was reported before and after it.
    """
    found = sorted(records, key=_age)
    misplaced = [one for one in found if one.status is Status.LOST and one.generation is None]
    ordered = [one for one in found if one not in misplaced]
    for record in misplaced:
        later = (at for at, one in enumerate(ordered) if one.generation and _index(one) > _index(record))
        ordered.insert(next(later, len(ordered)), record)
    return ordered


def newest_first(filesystem: pyarrow.fs.FileSystem, run_path: str) -> list[str]:
    """Paths of a run's checkpoints that may be restored, whether the stores wrote them or they were reported.

    Whether all of them are whole is not looked at.

    Raises:
        NotSupportedError, StorageError: See `current_state`.
    """
    records = by_age(current_state(filesystem, run_path).checkpoints)
    return [join(run_path, record.path) for record in reversed(records) if record.status.is_restorable]


def _age(record: Record) -> tuple[bool, Generation, int, str]:
    generation = Generation.parse(record.generation) if record.generation else Generation(0, 0, 0)
    return record.generation is not None, generation, record.report_index or 0, record.path


def _index(record: Record) -> int:
    return -1 if record.report_index is None else record.report_index
