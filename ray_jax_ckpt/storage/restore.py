"""Brings checkpoints back from storage: those of this package, and plain Orbax's."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.arrays.skeleton import Skeleton
from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.storage.filesystem import Place, describe, join, resolve, with_names
from ray_jax_ckpt.storage.foreign import TREE, Foreign, find_tree, unfinished
from ray_jax_ckpt.storage.manifest import FOLDER, MANIFEST
from ray_jax_ckpt.storage.rank_data import RankData
from ray_jax_ckpt.storage.reader import Reader
from ray_jax_ckpt.storage.run_checkpoints import newest_first
from ray_jax_ckpt.storage.run_directory import hint, is_run
from ray_jax_ckpt.storage.runs import newest_first as newest_written
from ray_jax_ckpt.storage.source import Source
from ray_jax_ckpt.storage.spares import named, spare, standing
from ray_jax_ckpt.storage.steps import UNNUMBERED, list_steps, step_of
from ray_jax_ckpt.storage.streams import Deadline, ask
from ray_jax_ckpt.system import available_bytes

logger = logging.getLogger(__name__)

_OWN_FILE = re.compile(r"(rank|leaf)_\d+(\..+)?")
STREAMS = 4
TIMEOUT_S = 600.0
"""Bound of opening a checkpoint, and of each batch that is read of it."""


@dataclass(frozen=True)
class Loaded:
    """What `load` gives back.

    Attributes:
        state: The state, in the template's structure.
        step: The training step; None if neither the checkpoint nor the name of its directory says it.
        data_by_rank: Every rank's `data`, of the group that saved it; None where a rank gave none. Read when it is
            asked for.
        metrics: Every rank's metrics.
        path: Where it was found.
        specs: What each leaf is.
        foreign: Whether another program wrote it, with plain Orbax.
        source: "storage".
    """

    state: Any = field(repr=False)
    step: int | None
    data_by_rank: Mapping[int, Any] = field(repr=False)
    metrics: Mapping[int, Mapping[str, Any]]
    path: str
    specs: Sequence[LeafSpec] = field(default=(), repr=False)
    foreign: bool = False
    source: str = "storage"


def load(
    where: Any,
    abstract_state: Any = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    partial: bool = False,
    cast: bool = False,
    shardings: Any = None,
    filesystem: Any = None,
    streams: int = STREAMS,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Reads a checkpoint from storage: of what it holds, the ranges that this process needs.

    Args:
        where: See `filesystem.resolve`. The directory of a checkpoint, of this package or of Orbax, or one that holds
            steps, or that of a run: the newest one that is whole is taken then.
        abstract_state: See `ray_jax_ckpt.restore`, as for the next ones. Of an Orbax checkpoint leaves are found by the
            names on their path.
        rank: Of this process.
        world_size: Of the group that restores together.
        partial: Leaves of the checkpoint may be left out.
        cast: Arrays may be converted to the template's dtype.
        shardings: Count against the template's.
        filesystem: Of pyarrow or fsspec, that `where` is on.
        streams: Files or chunks that are read at the same time. Each takes a few megabytes, or a chunk where chunks are
            compressed.
        timeout_s: Bound of opening it, and of each batch that is read.

    Raises:
        NoCheckpointError: There is no checkpoint, or it was not finished.
        IntegrityError: It is damaged, or lacks files.
        TreeMismatchError: It does not fit the template.
        StorageError, RestoreTimeoutError: Storage failed, or is too slow.
        ConfigError: `where` is no place.
    """
    place = resolve(where, filesystem)

    def restored(path: str) -> Loaded:
        with open_checkpoint((place[0], path), rank=rank, streams=streams, timeout_s=timeout_s) as source:
            return _restore(source, path, abstract_state, shardings, Options(partial, cast), (rank, world_size))

    deadline = Deadline.after(timeout_s)
    _check_no_file(place, deadline)
    if _is_checkpoint(place, deadline):
        return restored(place[1])
    return _newest(place, restored, deadline)


def load_data(place: Place, *, timeout_s: float = TIMEOUT_S) -> Mapping[int, Any]:
    """Every rank's `data` of the checkpoint at a path, without its state. Raises what `load` raises."""
    with open_checkpoint(place, timeout_s=timeout_s) as source:
        return RankData(source.indices(None), source.fetch)


def open_checkpoint(place: Place, *, rank: int = 0, streams: int = STREAMS, timeout_s: float = TIMEOUT_S) -> Source:
    """Opens the checkpoint at a path.

    Args:
        place: Filesystem and path.
        rank: Of a group that opens it; rank 0 looks whether all files are there.
        streams: See `load`.
        timeout_s: See `load`.

    Raises:
        NoCheckpointError, IntegrityError, NotSupportedError, StorageError, RestoreTimeoutError: As `load`.
    """
    (filesystem, path), free, deadline = place, available_bytes(), Deadline.after(timeout_s)
    effort: Any = {"streams": streams, "timeout_s": timeout_s, "available_bytes": free}
    try:
        return Reader(filesystem, path, listed=rank == 0, **effort)
    except (NoCheckpointError, IntegrityError) as error:
        problem, there = error, ask(lambda: standing(filesystem, path), f"Looking at {describe(*place)}", deadline)
    if there is not None and there != path:
        logger.warning("%s was being replaced when its writer was killed: %s is read in its place.", path, there)
        return open_checkpoint((filesystem, there), rank=rank, streams=streams, timeout_s=timeout_s)
    if isinstance(problem, IntegrityError):
        raise problem
    if there is None:
        raise _nothing(place, deadline)
    found = find_tree(filesystem, path, deadline)
    if found is None:
        raise _nothing(place, deadline)
    return Foreign(filesystem, found, step=step_of(named(path)), **effort)


def _restore(
    source: Source, path: str, template: Any, shardings: Any, options: Options, group: tuple[int, int]
) -> Loaded:
    leaves = None
    if template is not None:
        flat = tree.flatten(template)
        keys = (tree.typed_key_path(key) for key in flat.keys)
        leaves = list(zip(flat.paths, keys, flat.leaves, strict=True))
    indices = source.indices(leaves)
    layout = indices[group[0] if group[0] < len(indices) else 0].layout
    _check_skeleton(layout.skeleton, path)
    assembler = Assembler(indices, *group, alike=True, sharded=source.sharded)
    state = assembler.restore(template, shardings, options, source.fetch)
    data, specs = RankData(indices, source.fetch), [*map(LeafSpec.from_json, layout.leaves)]
    return Loaded(state, source.step, data, source.metrics, path, specs, isinstance(source, Foreign))


def _check_skeleton(text: str, path: str) -> None:
    try:
        Skeleton.from_json(json.loads(text))
    except (ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"What {path} says of its tree is damaged: {type(error).__name__}: {error}.") from None


def _newest(place: Place, restored: Callable[[str], Loaded], deadline: Deadline) -> Loaded:
    """The newest step that is whole; what is not is passed over with a warning."""
    failed: list[str] = []
    for name in _candidates(place, deadline):
        try:
            found = restored(name)
        except (NoCheckpointError, IntegrityError) as error:
            failed.append(f"{name}: {error}")
            logger.warning("Step passed over, since it is not whole: %s", error)
            continue
        return found
    if failed:
        raise NoCheckpointError(f"{describe(*place)} holds no whole checkpoint. Passed over: {' '.join(failed)}")
    raise _nothing(place, deadline)


def _check_no_file(place: Place, deadline: Deadline) -> None:
    filesystem, path = place
    info = ask(lambda: filesystem.get_file_info(path), f"Looking at {describe(*place)}", deadline)
    if info.type == pafs.FileType.File:
        raise NoCheckpointError(f"{describe(*place)} is a file, and a checkpoint is a directory. Give its path.")


def _candidates(place: Place, deadline: Deadline) -> list[str]:
    """Checkpoints in a directory that is none itself, newest first: of a run, by steps, or the only one."""
    filesystem, path = place
    of_run: list[str] = []
    if ask(lambda: is_run(filesystem, path), f"Looking at {describe(*place)}", deadline):
        of_run = ask(lambda: newest_first(filesystem, path), f"Listing the run {describe(*place)}", deadline)
    found = of_run or ask(lambda: newest_written(filesystem, path), f"Listing {describe(*place)}", deadline)
    if found:
        return found
    names = [*reversed(list_steps(filesystem, path, deadline).values())]
    return [join(path, name) for name in names] or _single(place, deadline)


def _single(place: Place, deadline: Deadline) -> list[str]:
    filesystem, path = place
    only = join(path, UNNUMBERED)
    names = [join(one, FOLDER) for one in (only, spare(only))]
    infos = ask(lambda: filesystem.get_file_info(names), f"Looking at {describe(*place)}", deadline)
    return [only] if any(info.type != pafs.FileType.NotFound for info in infos) else []


def _is_checkpoint(place: Place, deadline: Deadline) -> bool:
    """Whether a path is that of a checkpoint, whole or not, and not of a directory of some of this package's."""
    filesystem, path = place
    asked = f"Looking at {describe(*place)}"
    names = [join(path, MANIFEST)]
    # A bucket has no neighbours.
    names += [spare(path)] if "/" in path.strip("/") else []
    infos = ask(lambda: filesystem.get_file_info(names), asked, deadline)
    if any(info.type != pafs.FileType.NotFound for info in infos):
        return True
    if ask(lambda: is_run(filesystem, path) or newest_written(filesystem, path), asked, deadline):
        return False
    if _single(place, deadline):
        return False
    return _is_begun(place, deadline) or find_tree(filesystem, path, deadline) is not None


def _is_begun(place: Place, deadline: Deadline) -> bool:
    """Whether there are files of a checkpoint of this package, beside the manifest or what is named like its folder."""
    filesystem, path = place
    selector = pafs.FileSelector(join(path, FOLDER), allow_not_found=True)
    listed = ask(lambda: [*with_names(filesystem.get_file_info(selector))], f"Listing {describe(*place)}", deadline)
    if any(_OWN_FILE.fullmatch(info.base_name) for info in listed):
        return True
    asked = [join(path, name) for name in (FOLDER, TREE)]
    infos = ask(lambda: filesystem.get_file_info(asked), f"Looking at {describe(*place)}", deadline)
    return all(info.type != pafs.FileType.NotFound for info in infos)


def _nothing(place: Place, deadline: Deadline) -> NoCheckpointError:
    filesystem, path = place
    where, asked = describe(*place), f"Looking at {describe(*place)}"
    if ask(lambda: is_run(filesystem, path), asked, deadline):
        return NoCheckpointError(
            f"{where} is the directory of a run, and there is no checkpoint in it that can be restored. "
            f"ray_jax_ckpt.checkpoints({path!r}, status='all') says what became of those that there were."
        )
    if _is_begun(place, deadline):
        tree_ = ask(lambda: filesystem.get_file_info(join(path, TREE)), asked, deadline)
        return unfinished(where, loadable=tree_.type != pafs.FileType.NotFound)
    return NoCheckpointError(
        f"There is no checkpoint at {where}: neither {MANIFEST} of a finished one of this package, nor "
        f"Orbax's {TREE} there or in a directory below, nor directories named by a step, such as ckpt-7 or 7, nor a "
        f"run.{ask(lambda: hint(filesystem, path), asked, deadline)}"
    )
