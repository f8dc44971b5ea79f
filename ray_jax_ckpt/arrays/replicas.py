"""Leaves in host memory, kept so that each can be put together again from whatever parts of it still answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ray_jax_ckpt.arrays import capture, tree
from ray_jax_ckpt.model.shards import Box, box_of, covers, extent, intersect, whole, within
from ray_jax_ckpt.values import dtype_name

# jax.Device is no type to type checkers.
Device = Any


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a leaf is to go.

    Attributes:
        sharding: Devices, layout and memory kind; None for an uncommitted array on the default device.
        as_numpy: The leaf is to be a numpy array; `sharding` does not matter.
    """

    sharding: Sharding | None
    as_numpy: bool = False


@dataclasses.dataclass(frozen=True)
class Origin:
    """What an array was when it was captured; nothing that keeps its buffers alive."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type: bool
    key_impl: str | None
    target: Target

    @classmethod
    def of(cls, path: str, x: jax.Array | np.ndarray) -> Origin:
        """Describes an array leaf."""
        if isinstance(x, np.ndarray):
            return cls(path, x.shape, x.dtype, False, None, Target(None, as_numpy=True))
        target = Target(x.sharding if x.committed else None)
        if tree.is_key(x):
            return cls(path, x.shape, np.dtype(np.uint32), False, str(jax.random.key_impl(x)), target)
        return cls(path, x.shape, x.dtype, bool(getattr(x, "weak_type", False)), None, target)

    @property
    def spec(self) -> tree.LeafSpec:
        """The leaf's description, without a key path."""
        kind = "key" if self.key_impl else "numpy" if self.target.as_numpy else "array"
        return tree.LeafSpec(self.path, kind, self.shape, dtype_name(self.dtype), self.weak_type, self.key_impl, [])

    def finish(self, x: jax.Array) -> jax.Array:
        """Gives raw data back its weak type, or makes it a PRNG key again."""
        return tree.wrap_key(x, self.key_impl) if self.key_impl else tree.with_weak_type(x, self.weak_type)


class Restoring(Protocol):
    """A leaf on its way to its target. See `dispatch`."""

    def requests(self) -> list[tuple[jax.Array | np.ndarray, Sharding]]:
        """Returns what has to be copied where; may be empty."""
        ...

    def accept(self, copies: Sequence[jax.Array]) -> None:
        """Takes the dispatched copies, in the order of the requests. Without them, `wait` makes its own."""
        ...

    def wait(self) -> Any:
        """Blocks until the leaf is there and returns it.

        Raises:
            RuntimeError: a part of it was lost with every replica that held it; the message names the leaf.
        """
        ...


class Leaf(Protocol):
    """An array leaf of a snapshot. Restoring never consumes it, and may be repeated."""

    origin: Origin

    @property
    def buffers(self) -> list[jax.Array]:
        """Every device-made array that must be ready before the leaf counts as captured."""
        ...

    def restore(self, target: Target) -> Restoring:
        """Decides from where the leaf is brought to its target."""
        ...


def dispatch(restorings: Sequence[Restoring]) -> None:
    """Starts the copies of many leaves in one call, which takes a fraction of the time of one call each."""
    requests = [restoring.requests() for restoring in restorings]
    sources = [source for of_leaf in requests for source, _ in of_leaf]
    targets = [target for of_leaf in requests for _, target in of_leaf]
    try:
        copies = iter(jax.device_put(sources, targets, may_alias=False))
    except RuntimeError:
        # One of them does not answer. Copying one by one, each leaf finds out by itself, and chooses another replica.
        return
    for restoring, of_leaf in zip(restorings, requests, strict=True):
        restoring.accept([next(copies) for _ in of_leaf])


def lost(path: str, what: str, cause: BaseException | None) -> RuntimeError:
    """Returns the error for a part that no living replica holds."""
    error = RuntimeError(
        f"leaf {path or '(the whole state)'} cannot be restored from this snapshot: {what}. Restore an older "
        "checkpoint, or replicate this leaf along the replica axis."
    )
    error.__cause__ = cause
    return error


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """One shard in host memory: `box` of the leaf's data, as held by replica number `replica`."""

    box: Box
    replica: int
    device: Device | None
    data: jax.Array | np.ndarray

    @property
    def is_gone(self) -> bool:
        """Whether its memory was released. False does not mean that it can be read."""
        return isinstance(self.data, jax.Array) and self.data.is_deleted()

    def read(self) -> np.ndarray:
        """Returns its content. A view of the piece itself would keep a second host copy cached in it."""
        return self.data if isinstance(self.data, np.ndarray) else np.asarray(self.data.addressable_data(0))


def capture_shards(named: Sequence[tuple[str, jax.Array]], *, replica_axis_index: int) -> list[ShardedLeaf]:
    """Dispatches copies of every shard that this process holds, of all replicas, and returns without waiting."""
    plain = [tree.plain(x) for _, x in named]
    shards = [_shards(x) for x in plain]
    pinned = iter(capture.pin([shard for of_leaf in shards for shard in of_leaf]))
    places: dict[Any, list[tuple[Box, int, Device]]] = {}
    leaves = []
    for (path, x), data in zip(named, plain, strict=True):
        # Leaves of one shape and sharding, of which a state has many, are cut up once.
        if (alike := (data.sharding, data.shape)) not in places:
            places[alike] = _places(data, x.sharding, replica_axis_index)
        pieces = [Piece(*place, next(pinned)) for place in places[alike]]
        leaves.append(ShardedLeaf(Origin.of(path, x), data.shape, pieces))
    return leaves


def _shards(x: jax.Array) -> list[jax.Array]:
    if isinstance(x.sharding, SingleDeviceSharding):
        return [x]
    return [shard.data for shard in x.addressable_shards]


def _places(data: jax.Array, sharding: Sharding, replica_axis_index: int) -> list[tuple[Box, int, Device]]:
    replicas = _replica_of_device(sharding, replica_axis_index)
    return [(box_of(s.index, data.shape), replicas.get(s.device, 0), s.device) for s in data.addressable_shards]


def capture_numpy(path: str, x: np.ndarray) -> ShardedLeaf:
    """Copies a numpy leaf at once: the caller may write to it afterwards."""
    return ShardedLeaf(Origin.of(path, x), x.shape, [Piece(whole(x.shape), 0, None, capture.copy_host(x))])


def _replica_of_device(sharding: Sharding, replica_axis_index: int) -> Mapping[Device, int]:
    if not isinstance(sharding, NamedSharding) or not has_axis(sharding, replica_axis_index):
        return {}
    positions = np.ndenumerate(np.asarray(sharding.mesh.devices))
    return {device: position[replica_axis_index] for position, device in positions}


def has_axis(sharding: NamedSharding, index: int) -> bool:
    """Whether the sharding's mesh has an axis with this index."""
    return -len(sharding.mesh.axis_names) <= index < len(sharding.mesh.axis_names)


class ShardedLeaf:
    """An array leaf as the shards that this process holds of it, all replicas of them."""

    def __init__(self, origin: Origin, data_shape: tuple[int, ...], pieces: list[Piece]) -> None:
        self.origin = origin
        self.data_shape = data_shape
        self.pieces = pieces

    @property
    def buffers(self) -> list[jax.Array]:
        """The shards that are still being copied, or were."""
        return [piece.data for piece in self.pieces if isinstance(piece.data, jax.Array)]

    def restore(self, target: Target) -> Restoring:
        """Chooses living shards for the target's devices."""
        if target.as_numpy or target.sharding is None:
            return _ToHost(self, as_numpy=target.as_numpy)
        saved = self.origin.target.sharding
        if saved is not None and not _stays_local(saved, target.sharding, self.origin.shape):
            return _ViaSavedSharding(_ToDevices(self, saved), target.sharding)
        return _ToDevices(self, target.sharding)

    def assemble(self, box: Box, dead: set[Piece], cause: BaseException | None) -> np.ndarray:
        """Returns a new array with the content of `box`, from any living shards that overlap it."""
        while True:
            usable = [piece for piece in self.pieces if piece not in dead and not piece.is_gone]
            if not covers([piece.box for piece in usable], box):
                replicas = sorted({piece.replica for piece in self.pieces if intersect(piece.box, box) is not None})
                what = f"this process has no living copy of all of part {list(box)}"
                raise lost(self.origin.path, f"{what} (parts of it were in replicas {replicas})", cause)
            try:
                return self._read(box, usable, dead)
            except _PieceLost as error:
                cause = error.__cause__

    def _read(self, box: Box, usable: list[Piece], dead: set[Piece]) -> np.ndarray:
        result = np.empty(extent(box), self.pieces[0].data.dtype)
        for piece in {piece.box: piece for piece in reversed(usable)}.values():
            if (shared := intersect(piece.box, box)) is None:
                continue
            try:
                result[within(shared, box)] = piece.read()[within(shared, piece.box)]
            except RuntimeError as error:
                dead.add(piece)
                raise _PieceLost from error
        return result


class _PieceLost(Exception):
    """A shard could not be read; its cause says why."""


def _stays_local(saved: Sharding, wanted: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether every process finds what it needs among its own shards. All processes compute the same answer."""
    if wanted.is_fully_addressable or wanted == saved:
        return True
    have: dict[int, list[Box]] = {}
    for device, index in saved.devices_indices_map(shape).items():
        have.setdefault(device.process_index, []).append(box_of(index or (), shape))
    need = wanted.devices_indices_map(shape).items()
    return all(covers(have.get(device.process_index, []), box_of(index or (), shape)) for device, index in need)


class _ToHost:
    """A leaf on its way to one array in this process."""

    def __init__(self, leaf: ShardedLeaf, *, as_numpy: bool) -> None:
        self._leaf = leaf
        self._as_numpy = as_numpy

    def requests(self) -> list[tuple[jax.Array | np.ndarray, Sharding]]:
        return []

    def accept(self, copies: Sequence[jax.Array]) -> None:
        assert not copies

    def wait(self) -> Any:
        content = self._leaf.assemble(whole(self._leaf.data_shape), set(), None)
        if self._as_numpy:
            return content
        # jnp.array copies: the result may be donated. It is not committed to its device, as the original was not.
        return jax.block_until_ready(self._leaf.origin.finish(jnp.array(content)))


class _ToDevices:
    """A leaf on its way to the devices of a sharding, each shard from a holder of its own."""

    def __init__(self, leaf: ShardedLeaf, sharding: Sharding) -> None:
        self._leaf = leaf
        self._sharding = sharding
        self._dead: set[Piece] = set()
        self._cause: BaseException | None = None
        self._boxes = self._boxes_by_device()
        self._chosen: dict[Device, Piece] = {}
        self._copies: dict[Device, tuple[Piece | None, jax.Array]] = {}

    def requests(self) -> list[tuple[jax.Array | np.ndarray, Sharding]]:
        holders = {device: self._holder(device, box) for device, box in self._boxes.items()}
        self._chosen = {device: piece for device, piece in holders.items() if piece is not None}
        return [(piece.data, self._on(device)) for device, piece in self._chosen.items()]

    def accept(self, copies: Sequence[jax.Array]) -> None:
        for (device, piece), copy in zip(self._chosen.items(), copies, strict=True):
            self._copies[device] = (piece, copy)

    def _on(self, device: Device) -> Sharding:
        return SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)

    def _boxes_by_device(self) -> dict[Device, Box]:
        shape = self._leaf.origin.shape
        # The data of PRNG keys has more dimensions than the sharding speaks of; they are never cut.
        rest = whole(self._leaf.data_shape[len(shape) :])
        indices = self._sharding.addressable_devices_indices_map(shape).items()
        return {device: box_of(index or (), shape) + rest for device, index in indices}

    def _start(self, device: Device, box: Box) -> tuple[Piece | None, jax.Array]:
        where = self._on(device)
        while (piece := self._holder(device, box)) is not None:
            try:
                return piece, jax.device_put(piece.data, where, may_alias=False)
            except RuntimeError as error:
                self._give_up(piece, error)
        content = self._leaf.assemble(box, self._dead, self._cause)
        return None, jax.device_put(content, where, may_alias=False)

    def _holder(self, device: Device, box: Box) -> Piece | None:
        """Returns a living shard with exactly this content, the same device's if it has one, else the first's."""
        usable = [p for p in self._leaf.pieces if p.box == box and p not in self._dead and not p.is_gone]
        return min(usable, key=lambda piece: (piece.device != device, piece.replica), default=None)

    def _give_up(self, piece: Piece, error: RuntimeError) -> None:
        # A target without room says nothing about the source: trying the other replicas would hide the reason.
        if "RESOURCE_EXHAUSTED" in str(error):
            raise error
        self._dead.add(piece)
        self._cause = error

    def wait(self) -> jax.Array:
        origin = self._leaf.origin
        shards = [self._settle(device) for device in self._boxes]
        if isinstance(self._sharding, SingleDeviceSharding):
            return origin.finish(shards[0])
        if origin.key_impl:
            shards = [origin.finish(shard) for shard in shards]
        dtype = shards[0].dtype if shards else self._leaf.pieces[0].data.dtype
        result = jax.make_array_from_single_device_arrays(origin.shape, self._sharding, shards, dtype=dtype)
        return result if origin.key_impl else origin.finish(result)

    def _settle(self, device: Device) -> jax.Array:
        while True:
            piece, copy = self._copies.pop(device, None) or self._start(device, self._boxes[device])
            try:
                return jax.block_until_ready(copy)
            except RuntimeError as error:
                if piece is None:
                    raise
                self._give_up(piece, error)


class _ViaSavedSharding:
    """A leaf whose shards have to move between processes: all of them must restore it at the same time."""

    def __init__(self, saved: _ToDevices, wanted: Sharding) -> None:
        self._saved = saved
        self._wanted = wanted

    def requests(self) -> list[tuple[jax.Array | np.ndarray, Sharding]]:
        return self._saved.requests()

    def accept(self, copies: Sequence[jax.Array]) -> None:
        self._saved.accept(copies)

    def wait(self) -> jax.Array:
        return jax.block_until_ready(jax.device_put(self._saved.wait(), self._wanted))
