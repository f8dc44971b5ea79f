"""What a rank captures of a state and where it goes: computed once per tree structure and reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.arrays.capture import copy_host, pin_bytes
from ray_jax_ckpt.arrays.skeleton import Skeleton
from ray_jax_ckpt.arrays.staging import Place, Staging
from ray_jax_ckpt.errors import TreeMismatchError
from ray_jax_ckpt.model.index import Layout, lay_out
from ray_jax_ckpt.model.placement import Holders, concerned, host_part_id, partners, place, shards_of, stored_bytes
from ray_jax_ckpt.model.shards import Box, box_of, whole


@dataclass(frozen=True)
class Topology:
    """The group that snapshots together.

    Attributes:
        rank: This process's rank.
        domains: Failure domain of every rank.
        copies: Copies wanted.
        ranks: Rank by JAX process index, where they differ: on TPUs the runtime numbers the processes, not Ray.
        leaving: Ranks whose nodes are going to be taken away: what they hold goes elsewhere, and they get none.
    """

    rank: int
    domains: tuple[str, ...]
    copies: int
    ranks: Mapping[int, int] = field(default_factory=dict)
    leaving: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Capture:
    """One item: which shard of which leaf (None: a numpy leaf) goes to which place in the buffer."""

    leaf: int
    shard: int | None
    part: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """A rank's layout, how to fill it, and what one generation costs.

    Attributes:
        layout: Of the rank's buffer.
        captures: In layout order.
        values: Leaves kept in the index.
        stored: Bytes of its own and of peers that the stores of each rank in this failure domain hold per generation;
            every rank's `local` leaves are taken to be as large as this one's.
        staging: Copies that devices make first.
    """

    layout: Layout
    captures: tuple[Capture, ...] = field(repr=False)
    values: tuple[int, ...] = field(repr=False)
    stored: Mapping[int, tuple[int, int]]
    staging: Staging = field(repr=False, compare=False)


@dataclass
class Captured:
    """A state at the time of the call.

    Attributes:
        plan: What it was captured by.
        arrays: Copies: in pinned host memory or on their way there, on devices, or numpy.
        places: Per item, which array holds its bytes, and where in it.
        staged: Which arrays are on devices.
        values: Encoded.
    """

    plan: Plan
    arrays: list[Any] = field(repr=False)
    places: list[Place] = field(repr=False)
    staged: list[int] = field(repr=False)
    values: dict[int, Any] = field(repr=False)

    def write(self, buffer: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], str]) -> dict[str, list[str]]:
        """Copies everything into a buffer of `plan.layout.num_bytes`, each array as soon as it has left the device.

        Blocks, and raises what the copies from the devices raise.

        Args:
            buffer: uint8.
            copy: Copies its second argument into the first, both uint8 and of one length, and returns the digest.

        Returns:
            The digests per part, in item order.
        """
        try:
            self._leave_devices()
            return self._write(buffer, copy)
        except jax.errors.JaxRuntimeError as error:
            # A device can find out late that it has no room for a copy.
            if "RESOURCE_EXHAUSTED" in str(error):
                self.plan.staging.give_up(error)
            raise

    def _leave_devices(self) -> None:
        """Starts the transfer of what is still on devices. The memory there is free as soon as its bytes are here."""
        for number, array in zip(self.staged, pin_bytes([self.arrays[i] for i in self.staged]), strict=True):
            self.arrays[number] = array
        self.staged = []

    def _write(self, buffer: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], str]) -> dict[str, list[str]]:
        digests: dict[str, list[str]] = {part.id: [] for part in self.plan.layout.parts}
        contents: dict[int, np.ndarray] = {}
        for item, (number, start) in zip(self.plan.captures, self.places, strict=True):
            content = contents.get(number)
            if content is None:
                array = np.ascontiguousarray(np.asarray(self.arrays[number]))
                content = contents[number] = array.reshape(-1).view(np.uint8)
            target = buffer[item.offset : item.offset + item.num_bytes]
            digests[item.part].append(copy(target, content[start : start + item.num_bytes]))
        return digests


class HolderMaps:
    """Who holds which region of a global array. Few shardings and shapes serve many leaves, so each is looked at once.

    Args:
        ranks: As in `Topology`.
    """

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self._ranks = ranks
        self._maps: dict[Any, Holders] = {}
        self._digests: dict[int, str] = {}

    def of(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Holders:
        """The holders of every region; the same object for equal arguments, kept as long as this one."""
        key = (sharding, shape)
        if key not in self._maps:
            holders: dict[Box, set[int]] = {}
            for device, index in sharding.devices_indices_map(shape).items():
                rank = self._ranks.get(device.process_index, device.process_index)
                holders.setdefault(box_of(index, shape), set()).add(rank)
            self._maps[key] = {box: tuple(sorted(ranks)) for box, ranks in holders.items()}
        return self._maps[key]

    def digest(self, holders: Holders) -> str:
        """Of one that `of` returned."""
        if id(holders) not in self._digests:
            text = json.dumps(sorted(holders.items()))
            self._digests[id(holders)] = hashlib.sha256(text.encode()).hexdigest()
        return self._digests[id(holders)]


class Planner:
    """Keeps the plan of the tree structure that was seen last; a changed tree gets a new one.

    Args:
        topology: The group.
        on_device: Whether states are copied on their devices first.
    """

    def __init__(self, topology: Topology, *, on_device: bool = False) -> None:
        self._topology, self._on_device = topology, on_device
        self._signature: Any = None
        self._plan: Plan | None = None

    @property
    def leaving(self) -> frozenset[int]:
        """See `Topology`."""
        return self._topology.leaving

    def plan(self, flat: tree.Flat, describe: Callable[[tree.Flat], str] | None = None) -> Plan:
        """The plan for a state.

        Args:
            flat: The state.
            describe: Makes `Layout.orbax`, if the plan is to have it: on rank 0, once.

        Raises:
            UnsupportedLeafError: A leaf cannot be snapshotted.
            TreeMismatchError: Two leaves have the same path.
        """
        signature = (flat.treedef, tuple(map(_signature, flat.leaves)))
        if self._plan is None or signature != self._signature:
            plan = make_plan(flat, self._topology, on_device=self._on_device)
            self._plan, self._signature = plan, signature
        if describe is not None and self._topology.rank == 0 and not self._plan.layout.orbax:
            self._plan = replace(self._plan, layout=replace(self._plan.layout, orbax=describe(flat)))
        return self._plan


def capture(plan: Plan, flat: tree.Flat) -> Captured:
    """Dispatches the copies of a state that fits the plan.

    When it returns, the caller may do with the state what it likes.
    """
    data = {leaf: tree.plain(flat.leaves[leaf]) for leaf in {item.leaf for item in plan.captures}}
    staged = plan.staging.stage(_shards(plan.captures, data))
    arrays: list[Any] = list(staged.arrays)
    on_devices = iter(staged.places)
    places: list[Place] = []
    for item in plan.captures:
        places.append((len(arrays), 0) if item.shard is None else next(on_devices))
        if item.shard is None:
            arrays.append(copy_host(data[item.leaf]))
    values = {leaf: tree.encode_value(flat.leaves[leaf]) for leaf in plan.values}
    # With `on_device` the transfer can wait. Else it begins at once, also for what was packed on the way.
    later = [i for i, is_copy in enumerate(staged.is_copy) if is_copy and plan.staging.whole]
    now = sorted(set(range(len(staged.arrays))) - set(later))
    # At the end: the copies take the cores from all that follows.
    for i, array in zip(now, pin_bytes([arrays[i] for i in now]), strict=True):
        arrays[i] = array
    return Captured(plan, arrays, places, later, values)


def _shards(captures: Sequence[Capture], data: Mapping[int, Any]) -> list[jax.Array]:
    return [data[item.leaf].addressable_data(item.shard) for item in captures if item.shard is not None]


def make_plan(flat: tree.Flat, topology: Topology, *, on_device: bool = False) -> Plan:
    """See `Planner`."""
    specs = [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
    _check_paths(flat.paths)
    shared, local, values, maps = [], [], [], HolderMaps(topology.ranks)
    for number, (spec, leaf) in enumerate(zip(specs, flat.leaves, strict=True)):
        if spec.kind == "value":
            values.append(number)
        elif _is_global(leaf, topology):
            array = tree.plain(leaf)
            shared.append((number, maps.of(array.sharding, array.shape), array.dtype.itemsize))
        else:
            local += [(number, *where) for where in _local_shards(tree.plain(leaf))]
    rank, world_size = topology.rank, len(topology.domains)
    group = (topology.domains, topology.copies, topology.leaving)
    parts = place(shards_of(shared, concerned(topology.domains[rank], *group), *group), *group)
    mine = [part for part in parts if rank in part.keepers]
    host = (host_part_id(rank), partners(rank, *group), True)
    contents = [(p.id, p.targets, p.keepers[0] == rank, [(s.leaf, s.box, s.num_bytes) for s in p.shards]) for p in mine]
    placed = lay_out([*contents, (*host, [(leaf, box, size) for leaf, box, size, _ in local])])
    where = {(leaf, box): shard for leaf, box, _, shard in local} | _device_numbers(mine, flat.leaves)
    captures = tuple(
        Capture(item.leaf, where[item.leaf, item.box], part.id, part.offset + item.offset, item.num_bytes)
        for part in placed
        for item in part.items
    )
    kept_locally = frozenset(values) | {leaf for leaf, *_ in local}
    layout = Layout(
        rank=rank,
        world_size=world_size,
        structure=_structure(specs, kept_locally, topology, [maps.digest(holders) for _, holders, _ in shared]),
        leaves=tuple(spec.to_json() for spec in specs),
        local=kept_locally,
        parts=placed,
        skeleton=json.dumps(Skeleton.of(flat).to_json()),
    )
    stored = _with_local(stored_bytes(parts), topology, sum(x[2] for x in local))
    data = {item.leaf: tree.plain(flat.leaves[item.leaf]) for item in captures}
    staging = Staging(_shards(captures, data), whole=on_device)
    return Plan(layout, captures, tuple(values), stored, staging)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        # A tracer has no sharding; `describe` refuses it in words.
        return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None), getattr(leaf, "weak_type", False)
    if isinstance(leaf, np.ndarray | np.generic):
        # Not dtype.str: it is the same for all 8-bit floats, and for all 16-bit ones that are not numpy's own.
        return type(leaf), leaf.shape, leaf.dtype
    return type(leaf)


def _is_global(leaf: Any, topology: Topology) -> bool:
    """Whether the ranks hold shards of one array.

    What a process of several can see whole is its own, never a replica.
    """
    return isinstance(leaf, jax.Array) and (len(topology.domains) == 1 or not leaf.is_fully_addressable)


def _num_bytes(box: Box, dtype: Any) -> int:
    size = np.dtype(dtype).itemsize
    for start, stop in box:
        size *= stop - start
    return size


def _local_shards(leaf: Any) -> list[tuple[Box, int, int | None]]:
    """The unique regions of a leaf that this process has to itself: box, bytes, number among its addressable shards."""
    if isinstance(leaf, np.ndarray):
        return [(whole(leaf.shape), leaf.nbytes, None)]
    unique: dict[Box, int] = {}
    for position, shard in enumerate(leaf.addressable_shards):
        unique.setdefault(box_of(shard.index, leaf.shape), position)
    return [(box, _num_bytes(box, leaf.dtype), position) for box, position in unique.items()]


def _device_numbers(parts: Sequence[Any], leaves: Sequence[Any]) -> dict[tuple[int, Box], int | None]:
    return {
        (leaf, box): position
        for leaf in {shard.leaf for part in parts for shard in part.shards}
        for box, _, position in _local_shards(tree.plain(leaves[leaf]))
    }


def _check_paths(paths: Sequence[str]) -> None:
    if len(set(paths)) < len(paths):
        double = sorted({path for path in paths if paths.count(path) > 1})
        raise TreeMismatchError(f"Leaves with the same path cannot be told apart when they are restored: {double[:5]}.")


def _structure(
    specs: Sequence[tree.LeafSpec], local: frozenset[int], topology: Topology, sharded: Sequence[str]
) -> str:
    """Digest of what all ranks must agree on: paths, the global leaves' shapes and dtypes, and who holds what of them.

    The placement follows from these.
    """
    leaves = [[s.path, s.kind, *([] if i in local else [s.shape, s.dtype])] for i, s in enumerate(specs)]
    text = json.dumps([leaves, topology.domains, topology.copies, sorted(topology.leaving), list(sharded)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_local(
    stored: Mapping[int, tuple[int, int]], topology: Topology, local_bytes: int
) -> dict[int, tuple[int, int]]:
    """Of this failure domain's ranks, with the host parts."""
    domains, home = topology.domains, topology.domains[topology.rank]
    totals = {rank: stored.get(rank, (0, 0)) for rank in range(len(domains)) if domains[rank] == home}
    totals = {rank: (own + local_bytes, peer) for rank, (own, peer) in totals.items()}
    for rank in concerned(home, domains, topology.copies, topology.leaving):
        for target in partners(rank, domains, topology.copies, topology.leaving):
            if target in totals:
                own, peer = totals[target]
                totals[target] = (own, peer + local_bytes)
    return totals
