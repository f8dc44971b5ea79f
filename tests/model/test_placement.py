"""Placement: copies in distinct domains, natural replicas first, balanced, and the same on every rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.model.placement import Shard, concerned, partners, place, shards_of, stored_bytes


@st.composite
def groups(draw: st.DrawFn):
    world = draw(st.integers(1, 8))
    domains = [draw(st.sampled_from("abcd")) for _ in range(world)]
    copies = draw(st.integers(1, 4))
    leaving = draw(st.frozensets(st.integers(0, world - 1), max_size=world - 1))
    holders = st.sets(st.integers(0, world - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    shards = [
        Shard(leaf, ((0, size),), size, draw(holders))
        for leaf, size in enumerate(draw(st.lists(st.integers(0, 50), max_size=20)))
    ]
    return shards, domains, copies, leaving


def staying(ranks, leaving):
    return [rank for rank in ranks if rank not in leaving]


@given(groups())
def test_every_shard_is_in_as_many_domains_as_asked_for_or_exist(case):
    shards, domains, copies, leaving = case
    parts = place(shards, domains, copies, leaving)
    assert sorted(s.leaf for p in parts for s in p.shards) == [s.leaf for s in shards]
    existing = {domains[rank] for rank in staying(range(len(domains)), leaving)}
    for part in parts:
        where = [domains[rank] for rank in staying((*part.keepers, *part.targets), leaving)]
        assert len(where) == len(set(where)) == min(copies, len(existing))


@given(groups())
def test_only_holders_keep_and_bytes_travel_only_where_no_holder_lives(case):
    shards, domains, copies, leaving = case
    for part in place(shards, domains, copies, leaving):
        for shard in part.shards:
            assert set(part.keepers) <= set(shard.holders)
            natural = {domains[rank] for rank in staying(shard.holders, leaving) or shard.holders}
            assert len(part.keepers) == min(copies, len(natural))


@given(groups())
def test_a_leaving_rank_gets_no_copies_and_keeps_only_what_no_other_holder_can(case):
    shards, domains, copies, leaving = case
    for part in place(shards, domains, copies, leaving):
        assert leaving.isdisjoint(part.targets)
        if not leaving.isdisjoint(part.keepers):
            assert all(leaving.issuperset(shard.holders) for shard in part.shards)


@given(groups())
def test_a_rank_that_knows_only_its_own_shards_plans_them_the_same(case):
    shards, domains, copies, leaving = case
    everything = {p.id: p for p in place(shards, domains, copies, leaving)}
    for rank in range(len(domains)):
        mine = place([s for s in shards if rank in s.holders], domains, copies, leaving)
        kept = [p for p in mine if rank in p.keepers]
        assert kept == [p for p in everything.values() if rank in p.keepers]


@given(groups())
def test_a_domain_knows_what_its_stores_get_from_the_shards_that_concern_it(case):
    shards, domains, copies, leaving = case
    leaves = [(s.leaf, {s.box: s.holders}, 1) for s in shards]
    totals = stored_bytes(place(shards, domains, copies, leaving))
    for domain in set(domains):
        ranks = concerned(domain, domains, copies, leaving)
        near = shards_of(leaves, ranks, domains, copies, leaving)
        nearby = stored_bytes(place(near, domains, copies, leaving))
        for rank in (r for r in range(len(domains)) if domains[r] == domain):
            assert nearby.get(rank, (0, 0)) == totals.get(rank, (0, 0))


def test_when_all_ranks_are_leaving_they_are_placed_as_if_none_were():
    shards = [Shard(0, ((0, 2),), 8, (0,)), Shard(0, ((2, 4),), 8, (1,))]
    assert place(shards, ["n0", "n1"], 2, frozenset({0, 1})) == place(shards, ["n0", "n1"], 2)


def test_a_large_group_concerns_a_rank_no_more_than_its_neighbours():
    domains = [f"node{rank // 8}" for rank in range(1000)]
    leaves = [(0, {((rank, rank + 1),): (rank,) for rank in range(1000)}, 4)]
    ranks = concerned("node3", domains, 2)
    assert ranks == frozenset(range(16, 32))
    assert {s.holders[0] for s in shards_of(leaves, ranks, domains, 2)} == ranks


def test_replicated_shards_are_spread_over_their_holders():
    shards = [Shard(leaf, (), 10, (0, 1, 2, 3)) for leaf in range(100)]
    totals = stored_bytes(place(shards, "abcd", 2))
    assert [totals[rank] for rank in range(4)] == [(500, 0)] * 4


def test_one_large_shard_does_not_draw_the_small_ones_to_its_place():
    shards = [Shard(0, (), 1000, (0, 1)), *(Shard(leaf, (), 100, (0, 1)) for leaf in range(1, 11))]
    totals = stored_bytes(place(shards, "ab", 1))
    assert totals[0] == totals[1] == (1000, 0)


def test_two_ranks_each_push_what_only_they_hold():
    shards = [Shard(0, ((0, 2),), 8, (0,)), Shard(0, ((2, 4),), 8, (1,)), Shard(1, (), 4, (0, 1))]
    parts = {part.id: part for part in place(shards, ["n0", "n1"], 2)}
    assert {(p.keepers, p.targets) for p in parts.values()} == {((0,), (1,)), ((1,), (0,)), ((0, 1), ())}


@given(groups())
def test_partners_are_in_other_domains_each_in_another(case):
    _, domains, copies, leaving = case
    existing = {domains[rank] for rank in staying(range(len(domains)), leaving)}
    for rank in range(len(domains)):
        found = [domains[partner] for partner in partners(rank, domains, copies, leaving)]
        own = 0 if rank in leaving else 1
        assert len(found) == len(set(found)) == min(copies, len(existing)) - own
        assert rank in leaving or domains[rank] not in found


@pytest.mark.parametrize("per_node", [1, 4])
def test_no_store_receives_from_everybody(per_node):
    domains = [f"n{rank // per_node}" for rank in range(8)]
    received = Counter(partner for rank in range(8) for partner in partners(rank, domains, 2))
    assert set(received.values()) == {1}
