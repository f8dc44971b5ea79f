"""What is known of one generation, and what stores say of what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import Generation

NOWHERE: frozenset[str] = frozenset()


class Status(StrEnum):
    """What a generation is good for.

    PENDING: some part has no verified copy yet. COMPLETE: every part has one. PROTECTED: every part has
    min(copies, living failure domains) in distinct domains, draining stores not counted. ABANDONED: it can never become
    complete or was rejected.
    """

    PENDING = "pending"
    COMPLETE = "complete"
    PROTECTED = "protected"
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class Entry:
    """What is known of one generation.

    Attributes:
        world_size: Ranks that have to contribute.
        holders: Stores that hold a verified copy, per part. A part without any is known and missing.
        structure: Digest of the global tree and its placement, the same on all ranks; "" until the first rank told.
        damaged: Living stores that have room for a part but no good copy of it, per part: to be repaired there.
        digests: Digest of the copy of a part on each store that told, damaged ones that it still has included.
        claims: Per part, the lowest rank that has told what it captured, and the digest of that. Where ranks hold
            replicas of a part this decides which of them are right: ranks must never restore a mix.
    """

    world_size: int
    holders: Mapping[str, frozenset[str]] = field(default_factory=dict)
    structure: str = ""
    damaged: Mapping[str, frozenset[str]] = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    claims: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def expected(self) -> set[str]:
        """Parts it needs: those announced, and every rank's host part (which announces the rest)."""
        return {host_part_id(rank) for rank in range(self.world_size)} | self.holders.keys()

    # A large group reports thousands of times about a generation of thousands of parts: the transitions below look at
    # the parts that they are about, and copy the rest in one piece.

    def differing(self, parts: Iterable[str] | None = None) -> dict[str, frozenset[str]]:
        """Stores whose copy of a part is another than what its lowest rank captured, by part: of all, or of these."""
        claims = self.claims if parts is None else {part: self.claims[part] for part in parts if part in self.claims}
        found = {
            part: frozenset(store for store, digest in self.digests.get(part, {}).items() if digest != right)
            for part, (_, right) in claims.items()
        }
        return {part: stores for part, stores in found.items() if stores}

    def without(self, store: str, parts: Iterable[str]) -> Entry:
        """A store has no good copy of these parts."""
        gone = frozenset(parts)
        holders = {part: self.holders[part] - {store} for part in gone & self.holders.keys()}
        damaged = {part: self.damaged[part] - {store} for part in gone & self.damaged.keys()}
        digests = {
            part: {other: digest for other, digest in self.digests[part].items() if other != store}
            for part in gone & self.digests.keys()
        }
        return replace(
            self,
            holders={**self.holders, **holders},
            damaged={**self.damaged, **damaged},
            digests={**self.digests, **digests},
        )

    def repairable(self, stores: Mapping[str, Iterable[str]]) -> Entry:
        """These stores have no good copy of these parts (by part), but room for one."""
        if not stores:
            return self
        holders = {part: self.holders[part] - frozenset(stores[part]) for part in stores.keys() & self.holders.keys()}
        more = {part: self.damaged.get(part, NOWHERE) | frozenset(found) for part, found in stores.items()}
        return replace(self, holders={**self.holders, **holders}, damaged={**self.damaged, **more})


@dataclass(frozen=True)
class Held:
    """A store's report: it holds verified copies of these parts.

    Attributes:
        store: Who.
        generation: Of what.
        world_size: Ranks of the group that took it.
        parts: Parts it holds, all verified.
        announced: Parts that the generation needs, as far as this store's indices say.
        structure: Digest that must be equal on all ranks.
        incarnation: Which of the stores that have had this name.
        damaged: Parts that it found bad and would take again.
        digests: Digest of each part that it holds, as far as parts are digested.
        claims: What ranks have captured, as far as their indices are here: see `Entry.claims`.
        number: What a store says is numbered as it is said: it may arrive in another order.
    """

    store: str
    generation: Generation
    world_size: int
    parts: frozenset[str]
    announced: frozenset[str]
    structure: str
    incarnation: str = ""
    damaged: frozenset[str] = NOWHERE
    digests: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Statement:
    """Everything that a store holds. What it does not name it has not, or not any more.

    Attributes:
        store: Who.
        incarnation: Which of the stores that have had this name.
        number: See `Held`; the reports in it have the same.
        held: By generation.
    """

    store: str
    incarnation: str
    number: int
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Heard:
    """What a store has said.

    Attributes:
        statement: Number of its last statement.
        newest: Highest number of anything it said.
        parts: What it said that it holds, by generation, since that statement and in it.
    """

    statement: int
    newest: int
    parts: Mapping[Generation, frozenset[str]] = field(default_factory=dict)

    def after(self, report: Held) -> Heard:
        """And it said this."""
        parts = self.parts.get(report.generation, NOWHERE) | report.parts
        return Heard(self.statement, max(self.newest, report.number), {**self.parts, report.generation: parts})


@dataclass(frozen=True)
class Silent:
    """A store that lives and does not answer.

    Attributes:
        domain: Its failure domain.
        held: Parts that it had, by generation. None: nobody has heard, so it may have any.
    """

    domain: str
    held: Mapping[Generation, frozenset[str]] | None

    def has(self, generation: Generation, part: str, *, if_unheard: bool) -> bool:
        """Whether it had a part."""
        return if_unheard if self.held is None else part in self.held.get(generation, NOWHERE)
