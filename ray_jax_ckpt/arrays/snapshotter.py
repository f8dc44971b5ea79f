"""In-process snapshots in pinned host memory, taken while training goes on."""

from __future__ import annotations

import dataclasses
import logging
import operator
import pathlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import pathways, replicas, tree
from ray_jax_ckpt.arrays.replicas import Target
from ray_jax_ckpt.errors import SnapshotError, SnapshotTimeoutError, TreeMismatchError

logger = logging.getLogger(__name__)

# How long a load that resets the history lets a snapshot in progress finish, so that there are never three copies.
_RESET_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class SnapshotMetadata:
    """What `Snapshotter.latest` returns where Orbax is not loaded, with the fields of its `CheckpointMetadata`."""

    step: int
    path: Any
    metadata: None = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None
    metrics: Any = None


def _metadata(step: int) -> Any:
    # Importing Orbax takes seconds. Who compares types with Orbax's has it loaded.
    if "orbax.checkpoint" in sys.modules:
        try:
            from etils import epath
            from orbax.checkpoint import v1

            return v1.training.CheckpointMetadata(step=step, path=epath.Path(), metadata=None)
        except (ImportError, AttributeError, TypeError) as error:
            logger.debug("this version of orbax has no CheckpointMetadata of the known shape: %s", error)
    return SnapshotMetadata(step, pathlib.Path())


@dataclasses.dataclass(frozen=True)
class _Passed:
    """A leaf that is no array; held as it is."""

    value: Any


class _Snapshot:
    """One step's state in host memory."""

    def __init__(self, step: int, paths: Sequence[str], leaves: Sequence[replicas.Leaf | _Passed]) -> None:
        self.step = step
        self.leaves = dict(zip(paths, leaves, strict=True))

    @classmethod
    def take(cls, step: int, state: Any, *, replica_axis_index: int) -> _Snapshot:
        """Dispatches the copies of a state's arrays and copies what is numpy; does not wait for devices."""
        flat = tree.flatten(state)
        named = list(zip(flat.paths, flat.leaves, strict=True))
        arrays = [(path, leaf) for path, leaf in named if isinstance(leaf, jax.Array)]
        captured = iter(_capture(arrays, replica_axis_index=replica_axis_index))
        leaves = [next(captured) if isinstance(leaf, jax.Array) else _pass(path, leaf) for path, leaf in named]
        return cls(step, flat.paths, leaves)

    def wait(self) -> None:
        """Blocks until all copies are complete; raises what made one fail."""
        jax.block_until_ready(
            [x for leaf in self.leaves.values() if not isinstance(leaf, _Passed) for x in leaf.buffers]
        )

    def restore(self, abstract_state: Any) -> Any:
        """Returns the state with the shardings of the template; blocks until it is there."""
        wanted = tree.flatten(abstract_state)
        self._check(wanted)
        found = [self.leaves[path] for path in wanted.paths]
        started = [
            leaf if isinstance(leaf, _Passed) else leaf.restore(_target(template, leaf.origin.target))
            for leaf, template in zip(found, wanted.leaves, strict=True)
        ]
        replicas.dispatch([leaf for leaf in started if not isinstance(leaf, _Passed)])
        leaves = [leaf.value if isinstance(leaf, _Passed) else leaf.wait() for leaf in started]
        return jax.tree_util.tree_unflatten(wanted.treedef, leaves)

    def _check(self, wanted: tree.Flat) -> None:
        passed = {path for path, leaf in self.leaves.items() if isinstance(leaf, _Passed)}
        if missing := passed.difference(wanted.paths):
            raise TreeMismatchError(f"abstract_state lacks leaves that step {self.step} has: {sorted(missing)[:10]}")
        specs = [leaf.origin.spec for leaf in self.leaves.values() if not isinstance(leaf, _Passed)]
        kept = [i for i, path in enumerate(wanted.paths) if path not in passed]
        arrays = tree.Flat(
            tuple(wanted.paths[i] for i in kept),
            tuple(wanted.keys[i] for i in kept),
            [wanted.leaves[i] for i in kept],
            wanted.treedef,
        )
        if (why := tree.mismatch(specs, arrays, partial=False, cast=False)) is not None:
            raise TreeMismatchError(f"abstract_state does not fit the snapshot of step {self.step}:\n{why}")


def _pass(path: str, leaf: Any) -> replicas.Leaf | _Passed:
    plain = type(leaf) in (np.ndarray, np.memmap) and not leaf.dtype.hasobject and leaf.dtype.names is None
    return replicas.capture_numpy(path, leaf) if plain else _Passed(leaf)


def _capture(arrays: Sequence[tuple[str, jax.Array]], *, replica_axis_index: int) -> Sequence[replicas.Leaf]:
    functions = pathways.functions()
    if functions is not None and pathways.can_split(arrays, replica_axis_index=replica_axis_index):
        return pathways.capture_replicas(arrays, *functions, replica_axis_index=replica_axis_index)
    return replicas.capture_shards(arrays, replica_axis_index=replica_axis_index)


def _target(template: Any, saved: Target) -> Target:
    if isinstance(template, np.ndarray):
        return Target(None, as_numpy=True)
    if isinstance(template, jax.Array):
        return Target(template.sharding if template.committed else None)
    if template.sharding is not None:
        return Target(template.sharding)
    return dataclasses.replace(saved, as_numpy=False)


class _Worker:
    """The background thread and what it shares. It does not refer to the Snapshotter, whose collection ends it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.latest: _Snapshot | None = None
        self.is_busy = False
        self.epoch = 0
        self.error: tuple[int, BaseException] | None = None
        # A SimpleQueue may be written to from a finalizer at any moment; a lock could be held by the very thread.
        self._queue: queue.SimpleQueue[tuple[_Snapshot, int] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="ray_jax_ckpt-snapshotter", daemon=True)
        self.thread.start()

    def submit(self, snapshot: _Snapshot, epoch: int) -> None:
        self._queue.put((snapshot, epoch))

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._finish(*item)
            # Waiting for the next item must not keep this one alive: it may be replaced meanwhile.
            del item

    def _finish(self, snapshot: _Snapshot, epoch: int) -> None:
        error: BaseException | None = None
        try:
            snapshot.wait()
        except BaseException as e:
            error = e
            logger.exception("the snapshot of step %d failed; the one before stays loadable", snapshot.step)
        with self.condition:
            if error is not None:
                self.error = (snapshot.step, error)
            elif epoch == self.epoch:
                self.latest = snapshot
            self.is_busy = False
            self.condition.notify_all()

    def wait_idle(self, timeout_s: float | None) -> bool:
        with self.condition:
            return self.condition.wait_for(lambda: not self.is_busy, timeout_s)

    def raise_error(self) -> None:
        with self.condition:
            failed, self.error = self.error, None
        if failed is not None:
            raise SnapshotError(f"the snapshot of step {failed[0]} failed: {failed[1]}") from failed[1]


class Snapshotter:
    """Keeps the newest state of training in pinned host memory of this process, copied while training goes on.

    A drop-in for Orbax's Pathways `Snapshotter` on any backend and for any sharding. It survives the loss of devices,
    not that of its process. In a run of several processes each calls it for itself and holds its own shards, of all
    replicas.

    At most two copies of the state are in host memory: the newest complete one, and one in progress. `save`, `load` and
    `join` may be called from any thread.
    """

    def __init__(self, *, replica_axis_index: int = 0) -> None:
        """Starts the background thread.

        Args:
            replica_axis_index: Which axis of the leaves' meshes counts the replicas (physical slices, say). Leaves
                whose mesh has no such axis, or that have no mesh, count as one replica.
        """
        self.replica_axis_index = operator.index(replica_axis_index)
        self._worker = _Worker()
        self._is_closed = False
        weakref.finalize(self, self._worker.stop)

    def save(self, step: int, state: Any) -> bool:
        """Takes a snapshot: dispatches the copies and returns; they are completed in the background.

        When it returns, the caller may donate, delete or overwrite the state. Leaves may be arrays with any sharding
        and PRNG keys; numpy leaves are copied now; anything else is kept as it is.

        Args:
            step: The training step that the state belongs to.
            state: Any pytree.

        Returns:
            True if it was taken, False if it was skipped because the one before is still in progress.

        Raises:
            RuntimeError: closed, or an earlier snapshot failed in the background (raised once; this call
                takes nothing), or an array of the state was deleted.
        """
        if self._is_closed:
            raise RuntimeError(f"step {step} was not snapshotted: the Snapshotter is closed.")
        step = operator.index(step)
        self._worker.raise_error()
        worker = self._worker
        with worker.condition:
            if worker.is_busy:
                logger.warning("Snapshotter busy: skipped the snapshot of step %d.", step)
                return False
            worker.is_busy, epoch = True, worker.epoch
        try:
            snapshot = _Snapshot.take(step, state, replica_axis_index=self.replica_axis_index)
        except BaseException:
            with worker.condition:
                worker.is_busy = False
                worker.condition.notify_all()
            raise
        worker.submit(snapshot, epoch)
        return True

    def load(self, abstract_state: Any, *, reset_snapshot_state: bool = True) -> Any:
        """Restores the newest complete snapshot from whatever replicas still answer; blocks until it is there.

        Survivors are chosen for each part of each leaf. The snapshot is not consumed: another load gives the same, and
        the restored arrays may be donated. Where arrays span processes and the wanted shardings need shards of other
        processes, all processes must call it together; else each may call it alone.

        Args:
            abstract_state: The same tree with, per leaf, a `jax.ShapeDtypeStruct` or an array, on any mesh. The result
                has their shardings and memory kinds; a `ShapeDtypeStruct` without sharding means the saved one, an
                uncommitted array an uncommitted one, a numpy array numpy. Leaves that were not arrays come back as
                they were saved.
            reset_snapshot_state: Make the restored state, captured anew on its new devices, the only snapshot. One in
                progress is discarded. If that fails, a warning is logged and the old snapshot stays.

        Raises:
            RuntimeError: there is no snapshot, or no living replica holds some part of a leaf; the message names it.
            TreeMismatchError: `abstract_state` does not fit the snapshot. A ValueError.
        """
        with self._worker.condition:
            snapshot = self._worker.latest
        if snapshot is None:
            why = "the Snapshotter is closed" if self._is_closed else "none is complete"
            raise RuntimeError(f"No snapshots available to restore from: {why}.")
        state = snapshot.restore(abstract_state)
        if reset_snapshot_state:
            self._reset(snapshot.step, state)
        return state

    def _reset(self, step: int, state: Any) -> None:
        worker = self._worker
        with worker.condition:
            worker.epoch += 1
        worker.wait_idle(_RESET_WAIT_S)
        try:
            snapshot = _Snapshot.take(step, state, replica_axis_index=self.replica_axis_index)
            snapshot.wait()
        except Exception:
            logger.warning("the restored state of step %d could not be captured again", step, exc_info=True)
            return
        with worker.condition:
            worker.latest = snapshot

    def join(self, *, timeout_s: float | None = None) -> None:
        """Blocks until no snapshot is in progress.

        Args:
            timeout_s: Seconds to wait at most; None waits without limit.

        Raises:
            RuntimeError: a snapshot failed in the background since the last call that said so; chained to the reason.
            TimeoutError: it did not complete in time.
        """
        started = time.monotonic()
        if not self._worker.wait_idle(timeout_s):
            waited = time.monotonic() - started
            raise SnapshotTimeoutError(f"a snapshot is still in progress after {waited:.1f} s; raise timeout_s.")
        self._worker.raise_error()

    @property
    def latest(self) -> Any | None:
        """Metadata of the newest complete snapshot with its `.step`, or None. Never blocks, never raises.

        An Orbax `CheckpointMetadata` where Orbax is loaded, else an object with the same fields.
        """
        with self._worker.condition:
            snapshot = self._worker.latest
        return None if snapshot is None else _metadata(snapshot.step)

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Ends the background thread once it is done, and releases the snapshot. May be called again.

        A failure in the background that no `save` or `join` has raised yet is logged.
        """
        self._is_closed = True
        worker = self._worker
        worker.stop()
        worker.thread.join(timeout_s)
        if worker.thread.is_alive():
            logger.warning(
                "the snapshot in progress did not complete within %.0f s; its thread is left behind", timeout_s
            )
        with worker.condition:
            failed, worker.error, worker.latest = worker.error, None, None
            worker.epoch += 1
        if failed is not None:
            logger.error("the snapshot of step %d failed: %s", *failed)

    def __enter__(self) -> Snapshotter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
