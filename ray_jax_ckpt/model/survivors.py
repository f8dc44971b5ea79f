"""What survivors can complete of a snapshot without ranks that are gone: a pure function of their indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ray_jax_ckpt.model.index import Index, Item, PartLayout
from ray_jax_ckpt.model.placement import host_part_id
from ray_jax_ckpt.model.shards import covers, whole


def stand_in(indices: Sequence[Index], rank: int) -> Index | None:
    """An index for a rank that did not live to store its own, or None if something would be missing.

    Complete without a rank is what holds nothing that only this rank knew: every element of every global array is held
    by others, and no rank has anything to itself: no `data`, no host values, no arrays of its own. The others show
    that, since all ranks run one program; what the lost one would have stored is not known to anybody.

    Args:
        indices: Those of the surviving ranks, all of one generation.
        rank: Who is gone.
    """
    if not indices or any(index.data is not None or index.layout.local for index in indices):
        return None
    if not _whole(indices):
        return None
    layout, host = indices[0].layout, host_part_id(rank)
    empty = PartLayout(host, (), 0, 0, ())
    return Index(indices[0].generation, replace(layout, rank=rank, parts=(empty,)), {host: []})


def _whole(indices: Iterable[Index]) -> bool:
    """Whether the parts that these indices describe hold every leaf completely."""
    found: dict[int, list[Item]] = {}
    for index in indices:
        for part in index.layout.parts:
            for item in part.items:
                found.setdefault(item.leaf, []).append(item)
    leaves = next(iter(indices)).layout.leaves
    return all(_leaf_whole(found.get(number, ()), leaf["shape"]) for number, leaf in enumerate(leaves))


def _leaf_whole(items: Sequence[Item], shape: Sequence[int]) -> bool:
    if not items:
        return False
    # The words of PRNG keys are further dimensions, and never sharded.
    return covers((item.box for item in items), whole(shape) + items[0].box[len(shape) :])
