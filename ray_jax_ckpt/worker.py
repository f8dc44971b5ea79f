"""What a train function calls: `snapshot`, `restore`, `wait`, `latest`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import CheckpointConsistencyMode

from ray_jax_ckpt import _ray_compat
from ray_jax_ckpt.arrays.assemble import Assembler, Options
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint, UndecidedCheckpoint, undecided
from ray_jax_ckpt.config import positive_s
from ray_jax_ckpt.data_state import Reshard, decode_states
from ray_jax_ckpt.errors import (
    ConfigError,
    RestoreError,
    RestoreTimeoutError,
    SnapshotError,
    StoreError,
)
from ray_jax_ckpt.memory.messages import Located
from ray_jax_ckpt.memory.reader import Reader
from ray_jax_ckpt.metrics import stored
from ray_jax_ckpt.model.books import Status
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.pipeline import GRACE_S
from ray_jax_ckpt.restored import Restored, give_data
from ray_jax_ckpt.session import Session, current, current_or_none, is_off
from ray_jax_ckpt.storage.filesystem import is_place
from ray_jax_ckpt.stored import Wish, restore_stored


def snapshot(
    step: int,
    state: Any,
    *,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
    force: bool = False,
    timeout_s: float | None = None,
) -> SnapshotCheckpoint | None:
    """Keeps the training state of a step in memory that outlives this process. All ranks call it at the same steps.

    It returns when the copies from the devices are dispatched; storing, digesting and replicating go on in the
    background. What the snapshot holds is the state at the call: afterwards it may be donated, deleted, or mutated in
    place. Calls from several threads are served one after the other.

    Args:
        step: The training step, an int that grows within an attempt unless `restore` was called.
        state: Any pytree: arrays, PRNG keys, numpy arrays, numbers, strings, None. Arrays that span processes are
            stored once per shard; what a process of several has to itself (host values, its own arrays) is kept per
            rank.
        data: This process's own state, such as its data iterator: an object with `get_state` and `set_state`, one that
            saves files (Orbax's `StatefulCheckpointable`; its background part runs in the background), or plain values
            (numbers, strings, bytes, None, numpy arrays); or a dict, list or tuple of these, nested too. At most
            `SnapshotConfig.max_data_bytes`.
        metrics: By name: numbers, scalar arrays, text, bools, None, or lists and dictionaries of them. Scalar arrays
            are fetched from the devices in the background. `PersistConfig.score_attribute` names one by its path.
        force: Take it although no `every_n_steps` is due, and keep it until the handle is collected.
        timeout_s: Bound of waiting for the previous snapshot and for a buffer. None: `SnapshotConfig.timeout_s`.

    Returns:
        A handle, or None if no snapshot is due, it was skipped (with a warning), or `RAY_JAX_CKPT_ENABLED=0` is set.
        The same step again returns the same handle without copying again; metrics that come before it is stored are
        merged.

    Raises:
        StepError, UnsupportedLeafError, DataStateError, NoSessionError: The call cannot work; nothing was taken.
        ConfigError: A metric cannot be stored, or is to rank checkpoints and is no number; nothing was taken.
        MemoryLimitError: The first snapshot of an attempt needs more memory than it may have. Later ones are skipped
            with a warning, unless `force` is set.
        SnapshotError: Only with `force`: it could not be taken in time. Without it failures are warnings.
    """
    if is_off():
        return None
    session = current()
    plain = stored({} if metrics is None else metrics, defer=True, score=session.storage.score)
    handle = session.snapshot(step, state, data, plain, force, _bound(session, timeout_s))
    if handle is not None and session.rank == 0:
        session.storage.missing_score.look(step, plain)
    return handle


def restore(
    checkpoint: Any,
    abstract_state: Any = None,
    *,
    data: Any = None,
    partial: bool = False,
    cast: bool = False,
    shardings: Any = None,
    reshard_data: Reshard | None = None,
    filesystem: Any = None,
    timeout_s: float | None = None,
) -> Restored:
    """Brings a snapshot or checkpoint back, on any mesh.

    In the train function of a run with a `CheckpointManager` all ranks call it, and it returns when all have restored
    the same one. What lies on storage can be restored anywhere, also without a run; then every process is on its own.

    Args:
        checkpoint: What `ray.train.get_checkpoint()` returned, or a handle of `snapshot` (waits until it is complete).
            Or a checkpoint on storage, of this package or of plain Orbax: a `ray.train.Checkpoint`, a path, a URI such
            as `s3://bucket/path`, or a pair of path and filesystem. A directory that holds steps, such as that of an
            Orbax CheckpointManager, or that of a run, stands for the newest one that is whole.
        abstract_state: A tree of arrays or `jax.ShapeDtypeStruct`s with shardings; their mesh and the number of
            processes may differ from those of the snapshot. Functions and classes in it, such as those of an Equinox
            module, are taken from it. None gives numpy arrays in dictionaries, lists and tuples; a warning names the
            other classes that the snapshot had.
        data: What gets this rank's saved `data` back: the object, or the dict, list or tuple of objects, that
            `snapshot` was given, or its like. An object gets its state by `set_state`, or loads its files. With another
            number of processes than saved it, every object has to say how its state is resharded: by a method
            `reshard_state(states, *, rank, world_size)`, with the contract of `reshard_data`. Plain values beside
            them have to be equal on all ranks then.
        partial: The template may lack leaves that the snapshot has.
        cast: Arrays may be converted to the template's dtype.
        shardings: A sharding for all leaves, or a tree of them (a prefix of the template) that counts against the
            template's.
        reshard_data: Called by every rank if another number of processes saved the snapshot, and only then, as
            `reshard_data(states, rank=..., world_size=...)`: the saved `data` of every rank that gave any, by its rank
            (the same on all ranks; an object's state is what its `get_state` returned, or its files as a dict of path
            and bytes), and who this process is in the new group. Returns this rank's: `data` gets it put back, and it
            is `Restored.data`. It has to see to it that the ranks together go on where those that saved were.
        filesystem: Of pyarrow or fsspec, that a path on storage is on.
        timeout_s: Bound of each wait: for completeness, for transfers, for other ranks. None:
            `SnapshotConfig.timeout_s`; of storage 600 s.

    Raises:
        TreeMismatchError: Template and snapshot differ: by path, both sides.
        DataStateError: `data` cannot be put back, for one because the number of processes has changed and nothing says
            how to reshard it (`data_by_rank` of a restore without `data=` has every rank's).
        SnapshotLostError: Some part is on no living store.
        RestoreTimeoutError: Other ranks, or bytes, did not come in time.
        IntegrityError: No store could serve some part as it was captured.
        NoCheckpointError: There is no checkpoint at this place on storage, or an unfinished one.
        StorageError: Storage failed.
        RestoreError: Ranks restored different snapshots, or the run's coordinator is gone.
        NotSupportedError: A newer version of this package wrote it, or an Orbax that is too old.
    """
    if not isinstance(checkpoint, SnapshotCheckpoint | UndecidedCheckpoint) and is_place(checkpoint):
        bound = None if timeout_s is None else positive_s(timeout_s)
        wish = Wish(abstract_state, data, partial, cast, shardings, reshard_data, filesystem, bound)
        return restore_stored(checkpoint, wish, current_or_none(), _ask)
    handle = _snapshot_of(checkpoint)
    session = current()
    bound = _bound(session, timeout_s)
    session.record("restore_begin", step=handle.step)
    faults.reach("restore", handle.step)
    located = _locate(session, handle, bound)
    try:
        faults.reach("read", handle.step)
        indices = [Index.from_bytes(raw) for raw in located.indices]
        state, states, source = _read(
            session, located, indices, abstract_state, shardings, Options(partial, cast), bound
        )
        own = give_data(data, states, reshard_data, rank=session.rank, world_size=session.world_size)
        faults.reach("confirm", handle.step)
        key = (session.rank, session.decision.attempt, session.restores + 1)
        _ask(session, session.coordinator.confirm.remote(*key, handle.generation, bound), bound)
    except BaseException as error:
        session.coordinator.let_go.remote(session.rank, session.decision.attempt, f"{error!r:.300}")
        raise
    session.restored(handle.step)
    session.record("restore_end", step=handle.step, source=source)
    metrics = indices[session.rank if session.rank < len(indices) else 0].metrics
    return Restored(state, handle.step, own, states, dict(metrics), source)


def wait(timeout_s: float | None = None) -> None:
    """Waits until this rank's last snapshot is protected: in `copies` failure domains, or in all that live.

    Any rank may call it. Returns at once if nothing was snapshotted. Fewer living domains than `copies` is a warning.

    Raises:
        SnapshotError: It failed or was abandoned.
        SnapshotTimeoutError: It was not protected in time; the message says what is missing.
    """
    if is_off():
        return
    session = current()
    bound = _bound(session, timeout_s)
    session.drain(bound)
    generation = session.latest_generation
    if generation is None:
        return
    found, wanted = session.ask(session.coordinator.wait.remote(generation, Status.PROTECTED, bound), bound)
    if found < wanted:
        warnings.warn(
            f"Step {generation.step} is in {found} failure domain{'s' * (found != 1)}, copies={wanted} were asked for: "
            "more domains do not live. The loss of one may lose it.",
            RuntimeWarning,
            stacklevel=2,
        )


def latest(timeout_s: float | None = None) -> int | None:
    """The step of the newest complete snapshot, or None. Any rank may call it; ranks may see it at different times.

    Raises:
        SnapshotError: The run's coordinator does not answer.
    """
    if is_off():
        return None
    session = current()
    generation = session.ask(session.coordinator.latest.remote(), _bound(session, timeout_s))
    return None if generation is None else generation.step


def known_checkpoints(consistency: str | None, timeout_s: float) -> tuple[tuple[Any, str] | None, Any]:
    """Where this worker's run is, and what its coordinator knows of its checkpoints. See `checkpoints`."""
    session = current()
    if consistency is not None and _ray_compat.group() is not None:
        # Ray says when what this worker has reported is registered; it waits no longer than it is told.
        ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED, timeout_s=timeout_s)
    return session.ask(session.coordinator.checkpoints.remote(consistency, timeout_s), timeout_s + GRACE_S)


def _bound(session: Session, timeout_s: Any) -> float:
    return session.config.timeout_s if timeout_s is None else positive_s(timeout_s)


def _snapshot_of(checkpoint: Any) -> SnapshotCheckpoint:
    if isinstance(checkpoint, SnapshotCheckpoint):
        return checkpoint
    if isinstance(checkpoint, UndecidedCheckpoint):
        raise undecided(checkpoint.why)
    if checkpoint is None:
        raise ConfigError(
            "restore(None): there is nothing to restore. Check `get_checkpoint()` for None and initialise the "
            "state instead."
        )
    raise ConfigError(
        "restore takes what ray.train.get_checkpoint() or snapshot() returned, or a path, URI or (path, filesystem) on "
        f"storage, got {type(checkpoint)}."
    )


def _locate(session: Session, handle: SnapshotCheckpoint, timeout_s: float) -> Located:
    located = session.decision.located
    # Nothing that this attempt restores can be freed before every rank has stored a newer generation.
    if located is not None and located.generation == handle.generation and not session.committed_any:
        return located
    if handle.generation.attempt == session.decision.attempt:
        if session.latest_generation == handle.generation:
            session.drain(timeout_s)
        session.ask(session.coordinator.wait.remote(handle.generation, Status.COMPLETE, timeout_s), timeout_s)
    return _ask(
        session, session.coordinator.locate.remote(handle.generation, session.rank, session.decision.attempt), timeout_s
    )


def _ask(session: Session, ref: Any, timeout_s: float) -> Any:
    """What fails a restore is a RestoreError, also where it is somebody else's: a coordinator that is gone."""
    try:
        return session.ask(ref, timeout_s)
    except (SnapshotError, StoreError) as error:
        kind = RestoreTimeoutError if isinstance(error, TimeoutError) else RestoreError
        raise kind(f"The restore failed: {error}") from error


def _read(
    session: Session,
    located: Located,
    indices: list[Index],
    template: Any,
    shardings: Any,
    options: Options,
    timeout_s: float,
) -> tuple[Any, dict[int, Any], str]:
    def suspect(store: str, said: str) -> None:
        session.coordinator.suspect.remote(store, located.generation, session.decision.attempt, said)

    assembler = Assembler(indices, session.rank, session.world_size)
    with Reader(
        located,
        session.node_id,
        session.decision.secret,
        verify=session.config.verify,
        timeout_s=timeout_s,
        seat=session.rank,
        streams=session.config.streams,
        suspect=suspect,
        tls=session.tls,
    ) as reader:
        state = assembler.restore(template, shardings, options, reader.fetch)
        source = "memory:peer" if reader.used_peers else "memory:local"
        return state, decode_states(indices, reader.fetch), source
