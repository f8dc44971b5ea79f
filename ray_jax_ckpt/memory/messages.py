"""What workers, stores and the coordinator tell each other in Ray calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow.fs
from ray.actor import ActorHandle

from ray_jax_ckpt.config import TlsConfig
from ray_jax_ckpt.memory.arena import SegmentHandle
from ray_jax_ckpt.model.books import Held, Statement
from ray_jax_ckpt.model.choice import Tier
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease, Phase, Slot


@dataclass(frozen=True)
class RunIdentity:
    """Which run this is, and where its directory lies.

    Attributes:
        digest: The same for every driver of it.
        path: Of its directory.
        filesystem: That this is on. None: it has none, and nothing is written.
        rebuild: Makes the filesystem anew, with credentials of today; None where nobody knows how.
    """

    digest: str
    path: str
    filesystem: pyarrow.fs.FileSystem | None
    rebuild: Callable[[], pyarrow.fs.FileSystem] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What the user calls it."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Member:
    """One rank of a worker group and where it runs.

    Attributes:
        rank: World rank.
        node_id: Ray's id of its node.
        node_ip: Address of the node.
        index: Position among the run's workers on that node: with it a restarted worker finds the store it had before.
        domain: What fails together with it.
    """

    rank: int
    node_id: str
    node_ip: str
    index: int
    domain: str


@dataclass(frozen=True)
class Place:
    """Where a part lies in a store: the segment that a process on the same node maps, and the offset in it."""

    segment: SegmentHandle
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class StoreView:
    """A store as a reader sees it.

    Attributes:
        name: Its identity.
        node_id: Its node.
        address: Of its Flight server.
        places: Where its parts of one generation lie.
        own: Those of them that its own worker filled.
    """

    name: str
    node_id: str
    address: str
    places: Mapping[str, Place] = field(default_factory=dict)
    own: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankIndex:
    """A rank's encoded `Index` of a generation, and what can be said of it without decoding it.

    Attributes:
        rank: Whose.
        world_size: Ranks of its group.
        parts: Ids of the parts that it describes.
        raw: The index.
    """

    rank: int
    world_size: int
    parts: tuple[str, ...] = field(repr=False)
    raw: bytes = field(repr=False)


@dataclass(frozen=True)
class Located:
    """A complete generation, leased until the reader says that it is done.

    Attributes:
        generation: Which.
        world_size: Ranks of the group that took it.
        indices: One encoded `Index` per rank of that group.
        holders: Per part, the stores that hold a verified copy.
        stores: By name.
    """

    generation: Generation
    world_size: int
    indices: tuple[bytes, ...] = field(repr=False)
    holders: Mapping[str, tuple[str, ...]] = field(repr=False)
    stores: Mapping[str, StoreView] = field(repr=False)


@dataclass(frozen=True)
class Survey:
    """A complete generation as the coordinator sees it, the same for all ranks that ask.

    Attributes:
        located: Where it is.
        run: Name of the run.
        created_at_s: When it was first asked for, as Unix time.
    """

    located: Located = field(repr=False)
    run: str
    created_at_s: float


@dataclass(frozen=True)
class StoredPlace:
    """A checkpoint on storage.

    Attributes:
        generation: Of what. One that is none of this run's counts as of attempt 0, older than all others.
        path: Of its directory.
        filesystem: That this is on.
        tier: How it came there.
        created_at_s: Unix time; 0: not known.
    """

    generation: Generation
    path: str
    filesystem: pyarrow.fs.FileSystem
    tier: Tier = Tier.STORAGE
    created_at_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What a new worker group is told: one per attempt, the same for all ranks.

    Attributes:
        attempt: Number of this start of a worker group.
        members: The ranks.
        stores: Every rank's store. One that is still starting queues the calls it gets.
        secret: The run's, for reading stores on other nodes.
        located: What is restored from memory; None if it holds nothing complete, or storage something newer.
        leaving: Ranks on nodes that drain already: they get no copies.
        stored: What is restored from storage; None if that has nothing newer than memory.
        ray_counts: Whether what Ray gives counts where there is nothing else, or nothing but what the user named.
        needed: What was looked for, if there has to be something to restore; "" if there need not be.
    """

    attempt: int
    members: tuple[Member, ...]
    stores: Mapping[int, ActorHandle] = field(repr=False)
    secret: str = field(repr=False)
    located: Located | None
    leaving: frozenset[int] = frozenset()
    stored: StoredPlace | None = None
    ray_counts: bool = True
    needed: str = ""


@dataclass(frozen=True)
class StoredCheckpoint:
    """What a rank restored from storage, which the others have to have restored too.

    Attributes:
        path: Of its directory.
        step: None: not known.
    """

    path: str
    step: int | None

    def __str__(self) -> str:
        return f"{self.path} of step {self.step}"


@dataclass(frozen=True)
class Grant:
    """Leave to fill a slot of a store. `room` is what its segment offers, at least what was asked for."""

    slot: int
    segment: SegmentHandle
    room: int


@dataclass(frozen=True)
class StoreSettings:
    """What a store does as its run's current driver wants it.

    Attributes:
        verify: Whether it takes only what is digested. See `SnapshotConfig`.
        scrub_interval_s: Seconds between two background checks of what it holds; None for none.
        max_bytes: Upper limit of its memory; None for what the node has.
        tls: Certificates of its port. They count when it starts.
        streams: Connections that it spreads a large push over, at most.
    """

    verify: bool = True
    scrub_interval_s: float | None = None
    max_bytes: int | None = None
    tls: TlsConfig | None = None
    streams: int = 1


@dataclass(frozen=True)
class Group:
    """What a store is told of the worker group that it serves.

    Attributes:
        attempt: The group's.
        addresses: Flight address of each rank's store.
        settings: How it works from now on.
        members: The ranks. Kept for a coordinator that is killed and started again in mid-attempt.
        choice: What the attempt restored.
        first_attempt: Of the run as it was started anew; what is of earlier ones does not count.
    """

    attempt: int
    addresses: Mapping[int, str]
    settings: StoreSettings = field(default_factory=StoreSettings)
    members: tuple[Member, ...] = ()
    choice: Generation | None = None
    first_attempt: int = 0


@dataclass(frozen=True)
class Probe:
    """What a store tells somebody who looks at a run from outside.

    Attributes:
        pid: Its process id.
        rank: Of the worker that it serves; None before it was told of its group.
        coordinator: Whom it reports to.
        slots: Its buffers in use.
        leases: Holds on them.
    """

    pid: int
    rank: int | None
    coordinator: ActorHandle | None
    slots: tuple[Slot, ...]
    leases: tuple[Lease, ...]

    @property
    def generations(self) -> set[Generation]:
        """Generations of which it holds something."""
        return {slot.generation for slot in self.slots if slot.phase is Phase.HELD}


@dataclass(frozen=True)
class Inventory:
    """A store's answer to the question who it is and what it holds."""

    name: str
    node_id: str
    domain: str
    address: str
    attempt: int
    secret: str = field(repr=False)
    statement: Statement
    group: Group | None = None

    @property
    def incarnation(self) -> str:
        """Which of the stores that have had its name."""
        return self.statement.incarnation

    @property
    def held(self) -> tuple[Held, ...]:
        """What it holds, by generation."""
        return self.statement.held


def assemble_view(
    generation: Generation,
    answers: Iterable[tuple[StoreView, Sequence[RankIndex]]],
    excluded: Mapping[str, frozenset[str]],
) -> Located | None:
    """What stores say of a generation, put together; None if an index or a part is missing.

    Args:
        generation: Which.
        answers: What the stores say.
        excluded: Stores, by part, whose copies of it are not to be read.
    """
    indices: dict[int, RankIndex] = {}
    stores: dict[str, StoreView] = {}
    for view, found in answers:
        indices |= {index.rank: index for index in found}
        if view.places:
            stores[view.name] = view
    expected = {part for index in indices.values() for part in index.parts}
    holders = {
        part: tuple(sorted(n for n, v in stores.items() if part in v.places and n not in excluded.get(part, ())))
        for part in expected
    }
    world_size = max((index.world_size for index in indices.values()), default=0)
    if not world_size or indices.keys() != set(range(world_size)) or not all(holders.values()):
        return None
    return Located(generation, world_size, tuple(indices[rank].raw for rank in range(world_size)), holders, stores)
