"""Saving any object to a directory of checkpoints and restoring it from there, without a training run."""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from ray_jax_ckpt.errors import ConfigError, IntegrityError, NoCheckpointError, StepError
from ray_jax_ckpt.storage.files import exists
from ray_jax_ckpt.storage.filesystem import Place, describe, join, reading, resolve
from ray_jax_ckpt.storage.markers import int_keys
from ray_jax_ckpt.storage.restore import load, load_data
from ray_jax_ckpt.storage.retention import prune
from ray_jax_ckpt.storage.saving import Keeper, Kept, about, save_as
from ray_jax_ckpt.storage.spares import spare, standing
from ray_jax_ckpt.storage.steps import UNNUMBERED, list_steps, step_name
from ray_jax_ckpt.storage.writer import Effort
from ray_jax_ckpt.targets import as_saved, put_back, to_tree
from ray_jax_ckpt.values import encode_value

logger = logging.getLogger(__name__)


class OrbaxCheckpointHandler:
    """Saves states to a directory as checkpoints that Orbax reads, and restores them.

    For one process, in or out of a training run: its state may be on any number of its own devices. Not thread-safe.
    As a context manager it waits for what is being written.

    Args:
        async_checkpointing: Whether `save` returns as soon as it has a copy of the state, and a thread writes it. One
            is written at a time: the next call waits for it. What fails there is raised by the next call, by
            `wait_until_finished` or by `close`.

    Attributes:
        async_checkpointing: As given.
    """

    def __init__(self, async_checkpointing: bool = False) -> None:
        self.async_checkpointing = async_checkpointing
        self._keeper = Keeper()
        self._effort = Effort()
        self._executor: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._checkpointer: Any = None

    @property
    def checkpointer(self) -> Any:
        """A plain `orbax.checkpoint.StandardCheckpointer`, for who wants to use Orbax itself on these directories."""
        if self._checkpointer is None:
            import orbax.checkpoint

            self._checkpointer = orbax.checkpoint.StandardCheckpointer()
        return self._checkpointer

    def save(
        self,
        directory: Any,
        target: Any,
        step: int | None = None,
        keep: int | None = 1,
        overwrite: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Saves a target to `directory/ckpt-<step>`, or without a step to `directory/checkpoint`.

        Args:
            directory: A path, a URI, a (path, filesystem) pair, or what else `ray_jax_ckpt.restore` takes. It need not
                be there.
            target: A pytree, a flax nnx module or optimizer (all its variables), an object with `get_state` and
                `set_state`, a dataclass, or dictionaries, lists and tuples of these. PRNG keys and strings too.
            step: Of the training.
            keep: How many steps to keep in the directory, this one included: when it is complete the lowest others are
                removed, whenever they were saved (after step 8, step 3 with `keep=1` leaves 3). None keeps all.
                Checkpoints of other programs are left alone.
            overwrite: Whether to replace a checkpoint that is there. Whenever this process is killed, the old one or
                the new one can be restored. Where nothing can be renamed, the new one is written twice for that.
            metadata: Kept beside it, exactly: numbers, strings, bytes, numpy arrays, and dict, list and tuple of these.
                What of it is JSON Orbax shows as `custom_metadata`.

        Returns:
            The path of the checkpoint. With `async_checkpointing` it is complete when the next call, or
            `wait_until_finished`, returns.

        Raises:
            FileExistsError: There is one already, without `overwrite`.
            PersistError: Storage did not take it (an OSError).
            UnsupportedLeafError: Something in the target cannot be saved (a TypeError); the path is named.
            DataStateError: `metadata` cannot be saved (a ValueError).
            StepError: `step` is no step (a ValueError).
            ConfigError: `keep` is no number of steps (a ValueError).
        """
        self.wait_until_finished()
        step, keep = _checked_step(step), _checked_keep(keep)
        filesystem, base = resolve(directory)
        name = UNNUMBERED if step is None else step_name(step)
        data = None if metadata is None else {"value": encode_value(metadata, default=_encode_array)}
        kept = self._keeper.keep(to_tree(target), step=step, data=data)
        save = _Save(kept, (filesystem, base), name, step, keep, overwrite, _json_of(metadata), self._effort)
        if self.async_checkpointing:
            self._writing = self._background().submit(save.run)
        else:
            save.run()
        return _path_in(directory, join(base, name), name)

    save_to_directory = save

    def restore(
        self,
        directory: Any,
        target: Any = None,
        step: int | None = None,
        metadata_only: bool = False,
        _restore_args: Any = None,
    ) -> Any:
        """Restores a checkpoint from a directory; waits for what is being written first.

        Args:
            directory: As for `save`; one that Orbax wrote to does as well, or that of a single checkpoint, or of a run,
                which stands for its newest one.
            target: What was saved, or its like: modules and objects with `set_state` are changed in place, for a pytree
                or a dataclass there is a new one with its structure, types and shardings. None: the state as
                dictionaries, lists and tuples, with arrays on the default device; from plain Orbax, which does not keep
                the types of keys, names that are numbers are ints.
            step: Which. None: the newest that is whole, or else the one that was saved without a step.
            metadata_only: Whether only the metadata is wanted.
            _restore_args: Not used.

        Returns:
            The target, or the state; with `metadata_only` what `save` was given as `metadata`.

        Raises:
            ValueError: There is no such directory or checkpoint in it, or the target does not fit what was saved.
            RestoreError: It is damaged, or storage failed.
        """
        self.wait_until_finished()
        place = _found(resolve(directory))
        if metadata_only:
            return _first(_candidates(place, step), lambda found: load_data(found).get(0))
        template = None if target is None else to_tree(target)
        loaded = _first(_candidates(place, step), lambda found: load(found[::-1], template))
        if target is not None:
            return put_back(target, loaded.state)
        state = as_saved(loaded.state, loaded.specs)
        return int_keys(state) if loaded.foreign else state

    def get_checkpoint_steps(self, directory: Any) -> list[int]:
        """The steps in a directory of which there is a checkpoint, ascending; none if there is no such directory.

        Looks whether each was finished, not whether it is undamaged.
        """
        return list(self.list_checkpoints(directory))

    def latest_step(self, directory: Any) -> int | None:
        """The highest of `get_checkpoint_steps`; None if there is none."""
        return max(self.get_checkpoint_steps(directory), default=None)

    def list_checkpoints(self, directory: Any) -> dict[int, str]:
        """The paths of `get_checkpoint_steps` by step."""
        self.wait_until_finished()
        filesystem, base = resolve(directory)
        listed = list_steps(filesystem, base)
        return {
            step: _path_in(directory, join(base, name), name)
            for step, name in listed.items()
            if standing(filesystem, join(base, name)) is not None
        }

    def wait_until_finished(self) -> None:
        """Blocks until everything is written. Bounded by the timeout of the write, an hour.

        Raises:
            FileExistsError, PersistError: What went wrong since the last call.
        """
        if self._writing is None:
            return
        wait([self._writing])
        done, self._writing = self._writing, None
        done.result()

    def close(self) -> None:
        """Waits for what is being written, and raises what went wrong. May be called again."""
        try:
            self.wait_until_finished()
        finally:
            checkpointer, self._checkpointer = self._checkpointer, None
            if checkpointer is not None:
                checkpointer.close()
            background, self._executor = self._executor, None
            if background is not None:
                background.shutdown()

    def __enter__(self) -> OrbaxCheckpointHandler:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _background(self) -> ThreadPoolExecutor:
        # A program that ends waits for its last checkpoint. One thread for all: a new one would wait for a core beside
        # the copies of the state, and the caller for it.
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "ray_jax_ckpt-save")
        return self._executor


class _Save:
    """One checkpoint to be written."""

    def __init__(
        self,
        kept: Kept,
        place: Place,
        name: str,
        step: int | None,
        keep: int | None,
        overwrite: bool,
        custom: dict[str, Any],
        effort: Effort,
    ) -> None:
        self._kept, self._place, self._name, self._effort = kept, place, name, effort
        self._step, self._keep, self._overwrite, self._custom = step, keep, overwrite, custom

    def run(self) -> None:
        filesystem, base = self._place
        place = filesystem, join(base, self._name)
        save_as(self._kept, place, about(self._step, self._custom), overwrite=self._overwrite, effort=self._effort)
        if self._step is None:
            return
        try:
            prune(self._place, just_written=self._step, keep=self._keep)
        except (OSError, pa.ArrowException) as error:
            logger.warning("Step %d is saved; older steps in %s could not be removed: %s", self._step, base, error)


def _found(place: Place) -> Place:
    """The directory, if it is there."""
    filesystem, path = place
    with reading(f"Looking at {describe(*place)}"):
        if not _is_there(filesystem, path):
            raise NoCheckpointError(f"There is no directory {describe(*place)}.")
    return place


def _candidates(place: Place, step: int | None) -> list[Place]:
    """What may be meant, best first."""
    filesystem, base = place
    steps = list_steps(filesystem, base)
    if step is not None:
        if step not in steps:
            raise NoCheckpointError(f"There is no checkpoint of step {step} in {describe(*place)}: {_held(steps)}.")
        return [(filesystem, join(base, steps[step]))]
    names = [*reversed(steps.values()), UNNUMBERED]
    return [(filesystem, join(base, name)) for name in names if _is_there(filesystem, join(base, name))] or [place]


def _held(steps: Mapping[int, str]) -> str:
    return f"it has steps {', '.join(map(str, steps))}" if steps else "it has none"


def _is_there(filesystem: pafs.FileSystem, path: str) -> bool:
    return exists(filesystem, path) or ("/" in path.strip("/") and exists(filesystem, spare(path)))


def _first(candidates: Sequence[Place], restore: Callable[[Place], Any]) -> Any:
    """What the first one gives that is whole."""
    for place in candidates[:-1]:
        try:
            return restore(place)
        except (NoCheckpointError, IntegrityError) as error:
            logger.warning("A checkpoint is passed over, since it is not whole: %s", error)
    return restore(candidates[-1])


def _checked_step(step: Any) -> int | None:
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise StepError(f"step={step!r}: a step is an int of 0 or more, or None.")
    return number


def _checked_keep(keep: Any) -> int | None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ConfigError(f"keep={keep!r}: how many steps to keep is an int of 1 or more, or None for all.")
    return keep


def _encode_array(x: Any, path: str) -> Any:
    # Metrics are often JAX's.
    return encode_value(np.asarray(x) if isinstance(x, jax.Array) else x)


def _json_of(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """What Orbax can show of it."""
    found = {}
    for key, value in (metadata or {}).items():
        try:
            found[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            continue
    return found


def _path_in(directory: Any, path: str, name: str) -> str:
    """The path as the caller gave the directory: of a URI a URI."""
    given = os.fspath(directory) if isinstance(directory, str | os.PathLike) else ""
    if "://" not in given:
        return path
    location, mark, query = given.partition("?")
    return f"{location.rstrip('/')}/{name}{mark}{query}"
