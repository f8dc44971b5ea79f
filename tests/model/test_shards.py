"""Boxes against numpy: whatever a box operation says must be what slicing the real array gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.model.shards import (
    Generation,
    box_of,
    covers,
    extent,
    intersect,
    row_span,
    row_spans,
    volume,
    whole,
    within,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, outer: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """A non-empty box inside another."""
    ranges = []
    for start, stop in outer:
        low = draw(st.integers(start, stop - 1))
        ranges.append((low, draw(st.integers(low + 1, stop))))
    return tuple(ranges)


@st.composite
def nested(draw: st.DrawFn):
    shape = draw(SHAPES)
    outer = draw(box_in(whole(shape)))
    return shape, outer, draw(box_in(outer))


@given(nested())
def test_row_span_is_the_bytes_of_its_box_and_holds_the_inner_one(case):
    shape, outer, inner = case
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    stored = np.ascontiguousarray(array[within(outer, whole(shape))])
    offset, size, span = row_span(inner, outer, 4)
    block = np.frombuffer(stored.tobytes()[offset : offset + size], np.int32).reshape(extent(span))
    np.testing.assert_array_equal(block, array[within(span, whole(shape))])
    np.testing.assert_array_equal(block[within(inner, span)], array[within(inner, whole(shape))])


@given(st.data(), SHAPES)
def test_intersection_selects_the_same_elements_as_both_masks(data, shape):
    one, other = data.draw(box_in(whole(shape))), data.draw(box_in(whole(shape)))
    masks = [np.zeros(shape, bool), np.zeros(shape, bool)]
    for mask, box in zip(masks, (one, other), strict=True):
        mask[within(box, whole(shape))] = True
    shared = intersect(one, other)
    assert (0 if shared is None else volume(shared)) == (masks[0] & masks[1]).sum()


def test_row_span_reads_only_the_rows_it_needs():
    assert row_span(((2, 4), (0, 8)), ((0, 8), (0, 8)), 4) == (64, 64, ((2, 4), (0, 8)))
    assert row_span(((3, 4), (2, 5)), ((0, 8), (0, 8)), 4) == (104, 12, ((3, 4), (2, 5)))


@given(st.data(), SHAPES, st.integers(0, 60), st.integers(1, 4))
def test_row_spans_hold_the_inner_box_once_and_read_little_else(data, shape, run_bytes, itemsize):
    outer = data.draw(box_in(whole(shape)))
    inner = data.draw(box_in(outer))
    spans = row_spans(inner, outer, itemsize, run_bytes)
    inside = np.zeros(shape, int)
    for offset, size, span in spans:
        rows = np.arange(volume(outer)).reshape(extent(outer))[within(span, outer)].reshape(-1)
        assert (rows == np.arange(offset // itemsize, (offset + size) // itemsize)).all()
        shared = intersect(span, inner)
        assert shared is not None
        inside[within(shared, whole(shape))] += 1
    assert (inside[within(inner, whole(shape))] == 1).all()
    assert inside.sum() == volume(inner)
    pieces = len(row_spans(inner, outer, itemsize, 0))
    read = sum(size for _, size, _ in spans)
    assert read <= volume(inner) * itemsize + run_bytes * pieces
    assert sum(size for _, size, _ in row_spans(inner, outer, itemsize, 0)) == volume(inner) * itemsize


def test_narrow_columns_are_read_with_their_rows_and_wide_ones_alone():
    rows = ((0, 4), (0, 100))
    assert row_spans(((0, 4), (10, 20)), rows, 1, 1000) == [(0, 400, rows)]
    alone = [(r * 100 + 10, 50, ((r, r + 1), (10, 60))) for r in range(4)]
    assert row_spans(((0, 4), (10, 60)), rows, 1, 20) == alone


def test_covers_needs_every_element_once():
    halves = [((0, 4), (0, 2)), ((0, 4), (2, 4))]
    assert covers(halves, ((0, 4), (0, 4)))
    assert covers([*halves, halves[0]], ((1, 2), (1, 3)))
    assert not covers(halves[:1], ((0, 4), (0, 4)))


def test_empty_arrays_are_held_by_a_shard_without_bytes_and_by_nothing_else():
    empty = ((0, 0), (0, 4))
    assert covers([empty], empty)
    assert not covers([], empty)


def test_scalars_have_one_element():
    assert volume(()) == 1
    assert covers([()], ())
    assert intersect((), ()) == ()


def test_box_of_jax_slices():
    assert box_of((slice(None), slice(2, 4, None)), (3, 8)) == ((0, 3), (2, 4))


def test_generations_are_ordered_by_attempt_then_restores_then_step():
    lines = [Generation(1, 0, 90), Generation(1, 1, 10), Generation(2, 0, 5), Generation(2, 0, 6)]
    assert sorted(lines) == lines
    assert [Generation.parse(str(g)) for g in lines] == lines


@pytest.mark.parametrize("text", ["", "1.2", "1.2.3.4", "a.b.c"])
def test_what_is_no_generation_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        Generation.parse(text)
