"""What survivors may complete without a rank that is gone, and what they may not."""

from __future__ import annotations

import dataclasses

import pytest

from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.survivors import stand_in

SHAPE = (4, 6)


def index(rank: int, rows: tuple[int, int], **changes) -> Index:
    """One of three ranks, that keeps some rows of the only leaf."""
    item = (0, (rows, (0, 6)), (rows[1] - rows[0]) * 24)
    layout = Layout(
        rank, 3, "x", ({"path": "w", "shape": SHAPE},), frozenset(), lay_out([(f"s{rank}>", (), False, [item])])
    )
    return dataclasses.replace(Index(Generation(1, 0, 7), layout, {f"s{rank}>": ["d"]}), **changes)


def test_ranks_that_hold_all_rows_need_no_rank_that_has_nothing_to_itself():
    found = stand_in([index(0, (0, 2)), index(2, (2, 4))], 1)
    assert found is not None
    assert Index.from_bytes(found.to_bytes()).to_bytes() == found.to_bytes()
    assert found.generation == Generation(1, 0, 7)
    assert (found.layout.rank, found.layout.world_size, found.layout.structure) == (1, 3, "x")
    assert [(part.id, part.num_bytes, part.items) for part in found.layout.parts] == [("h1", 0, ())]


def test_rows_that_only_the_lost_rank_had_cannot_be_made_up():
    assert stand_in([index(0, (0, 2)), index(2, (2, 3))], 1) is None
    assert stand_in([], 1) is None


@pytest.mark.parametrize("own", ["data", "local"])
def test_what_the_lost_rank_may_have_had_to_itself_cannot_be_made_up(own):
    whole = index(0, (0, 4))
    changed = {"data": {"position": 3}} if own == "data" else {}
    other = index(2, (0, 4), **changed)
    if own == "local":
        other = dataclasses.replace(other, layout=dataclasses.replace(other.layout, local=frozenset({0})))
    assert stand_in([whole, whole], 1) is not None
    assert stand_in([whole, other], 1) is None


def test_the_words_of_prng_keys_count_as_held():
    layout = Layout(
        0,
        2,
        "x",
        ({"path": "k", "shape": (3,)},),
        frozenset(),
        lay_out([("s0>", (), False, [(0, ((0, 3), (0, 2)), 24)])]),
    )
    assert stand_in([Index(Generation(1, 0, 7), layout, {"s0>": ["d"]})], 1) is not None
