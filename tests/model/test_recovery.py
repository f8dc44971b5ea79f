"""Indices and read plans: bytes are found by global index range, verified against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.model import recovery
from ray_jax_ckpt.model.index import ALIGNMENT, Encoded, Index, Layout, lay_out
from ray_jax_ckpt.model.recovery import Catalog, Want, assign, choose_push, merge, plan_reads
from ray_jax_ckpt.model.shards import Generation, extent, whole, within

G = Generation(3, 1, 40)


def index(rank: int, parts, *, world_size: int = 2, local: frozenset[int] = frozenset()) -> Index:
    placed = lay_out(parts)
    layout = Layout(rank, world_size, "digest", ({"path": "w"}, {"path": "b"}), local, placed)
    digests = {part.id: [f"{rank}{part.id}{i}" for i in range(len(part.items))] for part in placed}
    return Index(G, layout, digests, {1: {"x": [1]}}, {"pos": 5}, {"loss": 0.5})


def test_an_index_comes_back_from_its_bytes():
    one = index(0, [("s0>1", (1,), True, [(0, ((0, 2), (0, 3)), 24)]), ("h0", (1,), True, [])])
    assert Index.from_bytes(one.to_bytes()) == one


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1, 2]", b'{"layout": {}, "contents": {}}', b"\xff\xfe"])
def test_what_is_no_index_is_refused(raw):
    with pytest.raises(ValueError, match=r"."):
        Index.from_bytes(raw)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=5), max_size=4))
def test_a_layout_overlaps_nowhere_and_is_aligned(sizes):
    parts = [(f"p{n}", (), True, [(n, ((0, size),), size) for size in part]) for n, part in enumerate(sizes)]
    end = 0
    for part in lay_out(parts):
        assert part.offset >= end
        assert part.offset % ALIGNMENT == 0
        inner = 0
        for item in part.items:
            assert item.offset % ALIGNMENT == 0
            assert item.offset >= inner
            inner = item.offset + item.num_bytes
        assert inner <= part.num_bytes
        end = part.offset + part.num_bytes


def cut(size: int, pieces: int) -> list[tuple[int, int]]:
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.data(),
)
def test_any_resharding_reads_what_numpy_slicing_gives(shape, old, new, data):
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    boxes = [(r, c) for r in cut(shape[0], old[0]) for c in cut(shape[1], old[1])]
    boxes = [box for box in boxes if all(a < b for a, b in box)]
    parts = [(f"s{n}", (), True, [(0, box, 2 * int(np.prod(extent(box))))]) for n, box in enumerate(boxes)]
    catalog = Catalog.of([index(0, parts)])
    buffers = {f"s{n}": np.ascontiguousarray(array[within(box, whole(shape))]).tobytes() for n, box in enumerate(boxes)}
    holders = {name: data.draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)) for name in buffers}
    wanted = [(r, c) for r in cut(shape[0], new[0]) for c in cut(shape[1], new[1]) if r[0] < r[1] and c[0] < c[1]]
    wants = [Want(box, catalog.shared(0), 2) for box in wanted]
    results = [np.full(extent(box), -1, np.int16) for box in wanted]
    for read in plan_reads(wants, holders, ["a"]):
        assert read.holder in holders[read.stored.part]
        assert read.holder == "a" or "a" not in holders[read.stored.part]
        raw = buffers[read.stored.part][read.offset : read.offset + read.num_bytes]
        block = np.frombuffer(raw, np.int16).reshape(extent(read.span))
        results[read.want][within(read.shared, wanted[read.want])] = block[within(read.shared, read.span)]
    for box, result in zip(wanted, results, strict=True):
        np.testing.assert_array_equal(result, array[within(box, whole(shape))])


def test_a_part_that_nobody_holds_is_named_by_position():
    catalog = Catalog.of([index(0, [("s0", (), True, [(0, ((0, 2),), 8)]), ("s1", (), True, [(0, ((2, 4),), 8)])])])
    wants = [Want(((0, 2),), catalog.shared(0), 4), Want(((1, 3),), catalog.shared(0), 4)]
    with pytest.raises(KeyError) as caught:
        plan_reads(wants, {"s0": ["a"], "s1": []}, [])
    assert caught.value.args == (1,)


def test_a_box_without_elements_needs_no_read():
    assert plan_reads([Want(((0, 0), (0, 4)), [], 4)], {}, []) == []


def test_reads_from_other_nodes_are_spread_over_the_holders():
    parts = [(f"s{n}", (), True, [(0, ((n, n + 1),), 100)]) for n in range(10)]
    catalog = Catalog.of([index(0, parts)])
    wants = [Want(((0, 10),), catalog.shared(0), 100)]
    reads = plan_reads(wants, {f"s{n}": ["a", "b"] for n in range(10)}, [])
    assert sorted(read.holder for read in reads) == ["a"] * 5 + ["b"] * 5


def test_of_equal_pieces_every_holder_serves_as_many():
    for count, pieces in ((2, 7), (3, 8), (4, 4)):
        names = [f"n{i}" for i in range(count)]
        chosen = assign([(f"p{i}", 10) for i in range(pieces)], {f"p{i}": names for i in range(pieces)}, [], seat=5)
        counts = [chosen.count(name) for name in names]
        assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(2, 4), st.integers(0, 50))
def test_holders_differ_by_no_more_than_the_largest_piece(sizes, count, seat):
    names = [f"n{i}" for i in range(count)]
    holders = {f"p{i}": names for i in range(len(sizes))}
    loads = dict.fromkeys(names, 0)
    for size, name in zip(sizes, assign(list(zip(holders, sizes, strict=True)), holders, [], seat=seat), strict=True):
        loads[name] += size
    assert max(loads.values()) - min(loads.values()) <= max(sizes)


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_need_a_single_piece_do_not_all_ask_the_same_holder(count, apart):
    """Ranks that need the same shard sit any regular distance apart."""
    names = [f"n{i}" for i in range(count)]
    chosen = [assign([("p", 10)], {"p": names}, [], seat=seat)[0] for seat in range(0, 64 * apart, apart)]
    assert all(32 // count <= chosen.count(name) <= 2 * 64 // count for name in names)


def test_what_a_reader_asked_for_before_counts_as_load():
    assert assign([("p", 10)], {"p": ["a", "b"]}, [], loads={"a": 5}) == ["b"]


def test_a_large_shard_comes_from_all_its_holders_and_small_ones_stay_together(monkeypatch):
    monkeypatch.setattr(recovery, "_BAND_BYTES", 100)
    monkeypatch.setattr(recovery, "_BUNDLE_BYTES", 40)
    catalog = Catalog.of(
        [index(0, [("s0", (), True, [(0, ((0, 10), (0, 10)), 400), *((n, ((0, 5),), 5) for n in range(1, 17))])])]
    )
    large = [Want(((0, 10), (0, 10)), catalog.shared(0), 4)]
    spans = merge(plan_reads(large, {"s0": ["a", "b"]}, []))
    assert {holder: sum(span.num_bytes for span in asked) for holder, asked in spans.items()} == {"a": 200, "b": 200}
    small = [Want(((0, 5),), catalog.shared(n), 1) for n in range(1, 17)]
    spans = merge(plan_reads(small, {"s0": ["a", "b"]}, []))
    assert [len(asked) for asked in spans.values()] == [1, 1]
    # Memory of the own node is not cut: it is used where it is.
    assert len(plan_reads(large, {"s0": ["a", "b"]}, ["b"])) == 1


def test_one_of_a_thousand_shards_is_found_without_looking_at_the_others():
    boxes = [((r, r + 2), (c, c + 4)) for r in range(0, 100, 2) for c in range(0, 80, 4)]
    parts = [(f"s{n}", (), True, [(0, box, 8), (1, box, 8)]) for n, box in enumerate(boxes)]
    catalog = Catalog.of([index(0, parts)])
    for leaf in (0, 1):
        found = list(catalog.shared(leaf).about(((30, 33), (4, 9))))
        assert {("s" + str(boxes.index(s.item.box))) == s.part for s in found} == {True}
        wanted = {box for box in boxes if box[0][0] < 33 and box[0][1] > 30 and box[1][0] < 9 and box[1][1] > 4}
        assert wanted <= {stored.item.box for stored in found}
        assert len(found) <= 2 * 20


def test_items_without_bytes_keep_their_own_digests():
    catalog = Catalog.of([index(0, [("s0", (), True, [(0, ((0, 0),), 0), (1, ((0, 0),), 0), (2, ((0, 4),), 4)])])])
    assert [stored.digest for leaf in (0, 1, 2) for stored in catalog.shared(leaf)] == ["0s00", "0s01", "0s02"]


def test_process_local_leaves_are_kept_per_rank_and_shared_parts_counted_once():
    shared = ("s0.1>", (), True, [(0, ((0, 2),), 8)])
    indices = [
        index(rank, [shared, (f"h{rank}", (), True, [(1, ((0, 1),), 4)])], local=frozenset({1})) for rank in (0, 1)
    ]
    catalog = Catalog.of(indices)
    assert len(catalog.shared(0)) == 1
    assert [[stored.part for stored in catalog.local(rank, 1)] for rank in (0, 1)] == [["h0"], ["h1"]]
    assert not list(catalog.local(0, 0))
    assert not list(catalog.shared(1))


def test_a_reader_of_a_large_group_decodes_only_the_items_of_ranks_that_hold_what_it_needs():
    indices = [
        index(rank, [(f"s{rank}>", (), True, [(leaf, ((rank, rank + 1),), 8) for leaf in (0, 1, 2, 7)])], world_size=99)
        for rank in range(99)
    ]
    decoded = [Index.from_bytes(one.to_bytes()) for one in indices]
    for rank, one in enumerate(decoded):
        if rank not in (40, 41):
            # Whoever looks at these meets an error.
            object.__setattr__(one.layout.parts[0], "items", Encoded("broken", tuple))
    catalog = Catalog.of(decoded)
    found = [catalog.shared(leaf).about(((40, 42),)) for leaf in (0, 7)]
    assert [[stored.part for stored in each] for each in found] == [["s40>", "s41>"]] * 2
    assert len(catalog.shared(7)) == 99
    assert not len(catalog.shared(3))
    with pytest.raises(ValueError, match="Expecting value"):
        catalog.shared(0).about(((39, 40),))


def test_items_without_their_digests_are_refused():
    one = index(0, [("s0>", (), True, [(0, ((0, 2),), 8)])])
    one.digests["s0>"].clear()
    with pytest.raises(ValueError, match="1 items, 0 digests"):
        list(Catalog.of([one]).shared(0))


def test_lost_copies_are_made_again_in_domains_that_lack_them():
    domains = {"a": "x", "b": "y", "c": "y", "old": "z"}
    receivers = {name: domains[name] for name in "abc"}
    pushes = choose_push({"p": frozenset({"a"}), "q": frozenset({"a"}), "r": frozenset({"b"})}, domains, receivers, 2)
    assert [(part, source) for part, source, _ in pushes] == [("p", "a"), ("q", "a"), ("r", "b")]
    assert {target for part, _, target in pushes if part in "pq"} == {"b", "c"}
    assert choose_push({"p": frozenset({"a"})}, domains, {"a": "x"}, 2) == []
