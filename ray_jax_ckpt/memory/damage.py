"""Bad copies: which ones the books have news of, what is said of them, and how stores come to drop them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ray.actor import ActorHandle

from ray_jax_ckpt.memory.roster import Roster
from ray_jax_ckpt.model.books import NOWHERE, Books, Held
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.shards import Generation

logger = logging.getLogger(__name__)

MAX_NAMED = 5

Record = Callable[..., None]
"""Adds an event to the run's log: its name, and fields."""


@dataclass(frozen=True)
class News:
    """Copies of one generation that a report showed to be bad.

    Attributes:
        damaged: Parts by store, whose bytes are not those that were captured.
        differing: Parts by store, captured by a rank otherwise than by the lowest one that holds a replica.
    """

    damaged: Mapping[str, frozenset[str]]
    differing: Mapping[str, frozenset[str]]

    def __bool__(self) -> bool:
        return bool(self.damaged or self.differing)


def news(before: Books, after: Books, generation: Generation) -> News:
    """What is bad by `after` and was not by `before`."""
    old, new = before.entries.get(generation), after.entries.get(generation)
    if new is None:
        return News({}, {})
    known = old.damaged if old is not None else {}
    fresh = {part: stores - known.get(part, NOWHERE) for part, stores in new.damaged.items()}
    # Asked for at every report, and nearly always there is nothing: only then are digests compared.
    fresh = {part: stores for part, stores in fresh.items() if stores}
    differing = new.differing(fresh)
    found: tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]] = ({}, {})
    for part, stores in fresh.items():
        for store in stores:
            by_store = found[store in differing.get(part, NOWHERE)]
            by_store[store] = by_store.get(store, NOWHERE) | {part}
    return News(*found)


def describe_differing(indices: Iterable[Index], parts: Iterable[str]) -> tuple[list[str], list[int]]:
    """Paths of the leaves whose shards the ranks that keep these parts captured differently, and those ranks."""
    paths: dict[str, None] = {}
    ranks: set[int] = set()
    ordered = sorted(indices, key=lambda index: index.layout.rank)
    for part in sorted(parts):
        keepers = [(index, layout) for index in ordered for layout in index.layout.parts if layout.id == part]
        for index, layout in keepers[1:]:
            first = keepers[0][0]
            pairs = zip(layout.items, first.digests[part], index.digests[part], strict=True)
            leaves = [item.leaf for item, right, other in pairs if right != other]
            paths |= dict.fromkeys(str(index.layout.leaves[leaf]["path"]) for leaf in leaves)
            ranks |= {first.layout.rank, index.layout.rank} if leaves else set()
    return list(paths), sorted(ranks)


def say_damaged(generation: Generation, damaged: Mapping[str, frozenset[str]], record: Record) -> None:
    """Logs what stores found damaged."""
    for store, parts in damaged.items():
        logger.warning(
            "Step %d: parts %s on store %s are damaged, or were taken without digests, and are not used.",
            generation.step,
            sorted(parts),
            store,
        )
        record("damaged", step=generation.step, store=store, parts=sorted(parts))


async def drop_differing(
    roster: Roster,
    living: Mapping[str, ActorHandle],
    generation: Generation,
    differing: Mapping[str, frozenset[str]],
    record: Record,
) -> list[Held]:
    """Says which replicas differ, and has those copies dropped that are not the lowest rank's.

    Args:
        roster: Whom to ask.
        living: The stores.
        generation: Of what.
        differing: Stores with copies to drop, by part.
        record: Where the event goes.

    Returns:
        What these stores report then.
    """
    views = await roster.ask(lambda store: store.view.remote(generation), living)
    raw = {one.rank: one.raw for _, indices in views.values() for one in indices}
    leaves, ranks = describe_differing(map(Index.from_bytes, raw.values()), differing)
    logger.warning(
        "Step %d: replicas of %s%s differ between ranks %s, and should be bitwise equal. What the lowest rank captured "
        "counts. SnapshotConfig(on_replica_mismatch='reject') abandons such a snapshot.",
        generation.step,
        leaves[:MAX_NAMED],
        " and more" if len(leaves) > MAX_NAMED else "",
        ranks,
    )
    record("replicas_differ", step=generation.step, leaves=leaves[:MAX_NAMED], ranks=ranks)
    reports = []
    for name in living.keys() & {store for stores in differing.values() for store in stores}:
        parts = frozenset(part for part, stores in differing.items() if name in stores)
        answers = await roster.ask(lambda s, parts=parts: s.drop.remote(generation, parts), {name: living[name]})
        reports += [report for report in answers.values() if report is not None]
    return reports
