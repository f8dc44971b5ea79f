"""Per-process `data`: iterators and plain values, captured at a step and put back, also in a group of another size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ray_jax_ckpt.arrays.assemble import Fetch
from ray_jax_ckpt.data_files import Saving, load_files, saves_files
from ray_jax_ckpt.errors import CheckpointError, DataStateError, SnapshotLostError
from ray_jax_ckpt.model.index import Index, Item, Layout, align
from ray_jax_ckpt.model.recovery import Stored, Want
from ray_jax_ckpt.values import decode_value, encode_value, with_article

Reshard = Callable[..., Any]
"""Called as `f(states, rank=..., world_size=...)`: see `ray_jax_ckpt.restore`."""

# More JSON than this is kept beside the index, which goes to every rank of a restoring group.
_MAX_INDEX_BYTES = 16 * 1024
_JSON_BLOB = "json"


class DataCapture:
    """The `data` of one process at the time of the call.

    Args:
        data: See `ray_jax_ckpt.snapshot`.
        max_bytes: What it may take.

    Raises:
        DataStateError: It cannot be saved, or is too large.
    """

    def __init__(self, data: Any, max_bytes: int) -> None:
        self.blobs: list[bytes] = []
        self._max_bytes = max_bytes
        self._savings: list[tuple[dict[str, Any], Saving]] = []
        try:
            self.encoded = encode_value(data, blobs=self.blobs, default=self._object)
            self._check(self.num_bytes)
        except BaseException as error:
            self.discard()
            if not isinstance(error, CheckpointError | TypeError):
                raise
            raise _cannot_be_saved(data, error) from error

    @property
    def num_bytes(self) -> int:
        """Of what lies beside the index, as far as it is known: before `finish`, files are not."""
        return sum(map(len, self.blobs))

    def finish(self) -> None:
        """Waits for objects that save files. Called once, in the background; blocks, and raises what they raise."""
        try:
            for target, saving in self._savings:
                files = saving.files(self._max_bytes - self.num_bytes)
                target.update(encode_value(files, blobs=self.blobs))
        finally:
            self.discard()
        text = json.dumps(self.encoded)
        self._check(self.num_bytes + len(text))
        if len(text) > _MAX_INDEX_BYTES:
            self.blobs.append(text.encode())
            self.encoded = {_JSON_BLOB: len(self.blobs) - 1}
        else:
            self.encoded = None if self.encoded is None else {"value": self.encoded}

    def discard(self) -> None:
        """Removes temporary files. May be called at any time, and again."""
        while self._savings:
            self._savings.pop()[1].discard()

    def _object(self, x: Any, path: str) -> Any:
        """How the encoder encodes what is no plain value."""
        get_state = getattr(x, "get_state", None)
        if callable(get_state):
            return encode_value(get_state(), blobs=self.blobs)
        if saves_files(x):
            target: dict[str, Any] = {}
            self._savings.append((target, Saving(x, path)))
            return target
        raise DataStateError(_refusal(x, path))

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise DataStateError(
                f"it has {num_bytes} bytes, and SnapshotConfig.max_data_bytes allows {self._max_bytes}."
            )


class DataRoom:
    """Room for large contents in a rank's host part.

    It only grows, and in leaps, so that the layout of the buffer stays the same while the data's size varies.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._made: tuple[Layout, Layout] | None = None

    def grow(self, num_bytes: int) -> None:
        """Makes room for so many bytes."""
        if num_bytes > self.num_bytes:
            leap = align(max(1, 2 ** num_bytes.bit_length() // 16))
            self.num_bytes = -(-num_bytes // leap) * leap

    def place(self, layout: Layout, blobs: Sequence[bytes]) -> tuple[Layout, list[int]]:
        """A layout with room for the contents, and where in the host part each begins."""
        if not blobs and not self.num_bytes:
            return layout, []
        self.grow(sum(align(len(blob)) for blob in blobs))
        if self._made is None or self._made[0] is not layout or self._made[1].host_part.num_bytes < self._end(layout):
            self._made = layout, layout.with_room(self.num_bytes)
        offsets, offset = [], align(layout.host_part.num_bytes)
        for blob in blobs:
            offsets.append(offset)
            offset += align(len(blob))
        return self._made[1], offsets

    def _end(self, layout: Layout) -> int:
        return align(layout.host_part.num_bytes) + self.num_bytes


def write_blobs(
    buffer: np.ndarray,
    layout: Layout,
    blobs: Sequence[bytes],
    offsets: Sequence[int],
    copy: Callable[[np.ndarray, np.ndarray], str],
) -> list[tuple[int, int, str]]:
    """Copies large contents to their places in the buffer; returns (offset in the host part, bytes, digest) each."""
    written = []
    for blob, offset in zip(blobs, offsets, strict=True):
        start = layout.host_part.offset + offset
        digest = copy(buffer[start : start + len(blob)], np.frombuffer(blob, np.uint8))
        written.append((offset, len(blob), digest))
    return written


def decode_states(indices: Sequence[Index], fetch: Fetch) -> dict[int, Any]:
    """Every rank's `data` as it was saved, None where a rank gave none.

    Raises:
        SnapshotLostError: No living store has all of it.
    """
    wants, owners = [], []
    for index in indices:
        part = index.layout.host_part.id
        for offset, size, digest in index.blobs:
            box = ((0, size),)
            wants.append(Want(box, [Stored(part, Item(-1, box, offset, size), digest)], 1))
            owners.append(index.layout.rank)
    try:
        found = fetch(wants, [np.dtype(np.uint8)] * len(wants))
    except KeyError as error:
        raise SnapshotLostError(
            f"Step {indices[0].generation.step}: no living store holds all data= of rank {owners[int(error.args[0])]}."
        ) from None
    blobs: dict[int, list[memoryview]] = {index.layout.rank: [] for index in indices}
    for rank, content in zip(owners, found, strict=True):
        blobs[rank].append(content.data)
    return {index.layout.rank: _decoded(index.data, blobs[index.layout.rank]) for index in indices}


def _decoded(data: Any, blobs: Sequence[memoryview]) -> Any:
    if data is None:
        return None
    try:
        value = json.loads(bytes(blobs[data[_JSON_BLOB]])) if _JSON_BLOB in data else data["value"]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise DataStateError(f"damaged data= ({type(error).__name__}: {error})") from error
    return decode_value(value, blobs)


# Putting back.


def put_back(data: Any, saved: Any) -> None:
    """Gives every object in `data` its saved state. All of it is checked before the first one gets its own.

    Raises:
        DataStateError: It does not fit; the message names the path.
    """
    if not _takes_state(data):
        raise DataStateError(
            f"data= of type {type(data).__name__} has no set_state(), and nothing in it has. Leave data= away and take "
            "Restored.data."
        )
    if saved is None:
        raise DataStateError(
            "The snapshot holds no data= of this rank. Leave data= away here, or give it to snapshot()."
        )
    found = list(_objects(data, saved, ""))
    for x, state, path in found:
        if not (_sets(x) or _is_files(state)):
            kind = with_article(type(state).__name__)
            raise DataStateError(f"data={_at(path)} loads files, and the snapshot has {kind} there.")
    for x, state, _ in found:
        if _sets(x):
            x.set_state(state)
        else:
            load_files(x, state)


def reshard(data: Any, states: Mapping[int, Any], rank: int, world_size: int, function: Reshard | None) -> Any:
    """This rank's `data` state in a group of another size, from those of all ranks of the group that saved it.

    Args:
        data: The objects that get it, in the structure that was saved.
        states: By rank.
        rank: Of this process in the new group.
        world_size: Of the new group.
        function: See `ray_jax_ckpt.restore`; None asks every object in `data` for its `reshard_state`.

    Raises:
        DataStateError: Nothing says how to reshard it.
    """
    given = {other: state for other, state in states.items() if state is not None}
    if not given:
        return None
    if function is not None:
        return function(given, rank=rank, world_size=world_size)
    return _resharded(data, given, (len(states), rank, world_size), "")


def _resharded(data: Any, states: Mapping[int, Any], sizes: tuple[int, int, int], path: str) -> Any:
    saved_by, rank, world_size = sizes
    method = getattr(data, "reshard_state", None)
    if callable(method):
        return method(states, rank=rank, world_size=world_size)
    if type(data) in (dict, list, tuple):
        children = {other: dict(_children(data, state, path)) for other, state in states.items()}
        first = next(iter(children.values()))
        made = {
            key: _resharded(child[0], {other: found[key][1] for other, found in children.items()}, sizes, child[2])
            for key, child in first.items()
        }
        return made if isinstance(data, dict) else type(data)(made.values())
    if not _restores(data):
        values = [encode_value(state) for state in states.values()]
        if all(value == values[0] for value in values):
            return next(iter(states.values()))
    raise DataStateError(
        f"data={_at(path)} was saved by {saved_by} processes and cannot be handed to {world_size}: "
        f"{type(data).__name__} has no reshard_state(states, rank, world_size). Give it one, pass "
        "restore(reshard_data=function), or leave data= away and divide Restored.data_by_rank yourself."
    )


def _objects(data: Any, saved: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Every object in `data` that takes a state, with the one that was saved there."""
    if _restores(data):
        yield data, saved, path
    elif type(data) in (dict, list, tuple):
        for _, (child, state, where) in _children(data, saved, path):
            yield from _objects(child, state, where)


def _children(data: Any, saved: Any, path: str) -> Iterator[tuple[Any, tuple[Any, Any, str]]]:
    """Pairs what is in a container with what was saved of it: key, (object, state, path)."""
    if (
        type(saved) is not type(data)
        or len(saved) != len(data)
        or (isinstance(data, dict) and saved.keys() != data.keys())
    ):
        given, there = with_article(_sketch(data)), with_article(_sketch(saved))
        raise DataStateError(
            f"data={_at(path)} is {given}, and the snapshot has {there} there. Give restore() the structure that "
            "snapshot() was given, or leave data= away and take Restored.data."
        )
    for key in data if isinstance(data, dict) else range(len(data)):
        yield key, (data[key], saved[key], f"{path}[{key!r}]")


def _takes_state(data: Any) -> bool:
    """Whether anything in it does."""
    if type(data) in (list, tuple):
        return any(map(_takes_state, data))
    return any(map(_takes_state, data.values())) if type(data) is dict else _restores(data)


def _restores(x: Any) -> bool:
    return _sets(x) or saves_files(x)


def _sets(x: Any) -> bool:
    return callable(getattr(x, "set_state", None))


def _is_files(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(content, bytes) for content in state.values())


def _sketch(x: Any) -> str:
    if isinstance(x, dict):
        return f"dict with keys {sorted(map(repr, x))[:10]}"
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, list | tuple) else type(x).__name__


def _at(path: str) -> str:
    return f" at {path}" if path else ""


# Refusals.


def _cannot_be_saved(data: Any, error: Exception) -> DataStateError:
    if is_ray_data(data):
        return DataStateError(str(error))
    return DataStateError(
        f"data= of type {type(data).__name__} cannot be saved: {error} Give an object with get_state() and set_state() "
        "whose state is made of numbers, strings, bytes, numpy arrays, lists and dictionaries; one that saves files as "
        "Orbax's StatefulCheckpointable; such plain values; or a dict, list or tuple of these."
    )


def _refusal(x: Any, path: str) -> str:
    if is_ray_data(x):
        return _RAY_DATA.format(where=_at(path), kind=type(x).__name__)
    if isinstance(x, Iterator) and not callable(getattr(x, "get_state", None)):
        kind = with_article(type(x).__name__)
        return f"the value at {path or '(the top)'} is {kind}, an iterator that does not tell its position."
    return f"the value at {path or '(the top)'} is {with_article(type(x).__module__)}.{type(x).__qualname__}."


_RAY_DATA = (
    "data={where} is a Ray Data {kind}, which cannot tell how far it has been read nor go on from there. Save what you "
    "have consumed instead, data={{'epoch': epoch, 'batches': batches}}, and after a restore skip so many: "
    "itertools.islice(shard.iter_batches(...), batches, None). That gives the same data again only if its order is "
    "fixed: set ray.data.DataContext.get_current().execution_options.preserve_order = True, shuffle with a seed that "
    "you derive from the epoch, and keep the number of workers. Or read with an iterator that has a state, such as "
    "grain's."
)


def is_ray_data(x: Any) -> bool:
    """Whether it is one of Ray Data's: a shard, a dataset, or what their `iter_batches` returns."""
    return any(kind.__module__.startswith("ray.data") for kind in type(x).__mro__)
