"""Ranks that snapshot different steps or trees are found by their reports, in whatever order these come."""

from __future__ import annotations

import itertools

import pytest

from ray_jax_ckpt.model.attendance import MAX_LEAVES, MAX_REMEMBERED, Attendance, Began, began, describe
from ray_jax_ckpt.model.shards import Generation


def at(step, restores=0):
    return Generation(1, restores, step)


def reports_of(rank, steps, structure="s", leaves=()):
    previous = [None, *map(at, steps)]
    return [
        Began(rank, at(step), before, structure, leaves if before is None else ())
        for step, before in zip(steps, previous, strict=False)
    ]


def found_in(world_size, reports):
    attendance, found = Attendance(world_size), {}
    for report in reports:
        attendance, hopeless = began(attendance, report)
        found |= hopeless
    return attendance, found


def test_ranks_that_snapshot_the_same_steps_are_left_alone_in_every_order():
    reports = reports_of(0, [10, 20]) + reports_of(1, [10, 20])
    for order in itertools.permutations(reports):
        attendance, found = found_in(2, order)
        assert found == {}
        assert attendance.structures == {}


def test_one_that_is_ahead_is_no_fault():
    attendance, found = found_in(2, reports_of(0, [10, 20, 30]) + reports_of(1, [10]))
    assert found == {}
    assert set(attendance.structures) == {at(20), at(30)}


def test_steps_that_a_rank_leaves_out_are_named_in_every_order():
    for order in itertools.permutations(reports_of(0, [10, 20]) + reports_of(1, [11, 21])):
        _, found = found_in(2, order)
        # Rank 0 may still come to 21.
        assert found.keys() == {at(10), at(11), at(20)}
        assert "rank 1 went on to step 11 without it, ranks [0] snapshotted it" in found[at(10)]
        assert "rank 0 went from step 10 on to step 20 without it, ranks [1] snapshotted it" in found[at(11)]
        assert "rank 1 went from step 11 on to step 21 without it, ranks [0] snapshotted it" in found[at(20)]


def test_a_repeated_report_changes_nothing():
    reports = reports_of(0, [10, 20]) + reports_of(1, [10, 20])
    assert found_in(2, [each for each in reports for _ in range(2)])[1] == {}


def test_a_restore_starts_a_new_line_in_which_lower_steps_are_newer():
    line = [at(10), at(20), at(10, 1), at(20, 1)]
    reports = [
        Began(rank, now, before, "s") for rank in (0, 1) for before, now in zip([None, *line], line, strict=False)
    ]
    assert found_in(2, reports)[1] == {}


def test_different_trees_are_named_with_what_differs():
    for order in itertools.permutations(
        [
            *reports_of(0, [5], "a", ("w (array float32[2])", "b (value)")),
            *reports_of(1, [5], "b", ("w (array float32[3])", "b (value)")),
        ]
    ):
        (reason,) = found_in(2, order)[1].values()
        assert "ranks snapshotted different trees" in reason
        assert "only ranks [0] have w (array float32[2]); only ranks [1] have w (array float32[3])" in reason
        assert "b (value)" not in reason
    same = ("w",)
    (reason,) = found_in(2, reports_of(0, [5], "a", same) + reports_of(1, [5], "b", same))[1].values()
    assert reason.endswith("the leaves are the same, their shardings are not")


def test_many_are_summed_up():
    odd = [report for rank in range(1, 40) for report in reports_of(rank, [7])]
    _, found = found_in(40, [*reports_of(0, [5]), *odd])
    (reason,) = found.values()
    assert reason.startswith("rank 1 went on to step 7 without it")
    _, found = found_in(40, [*odd, *reports_of(0, [5])])
    assert "rank 5 went on to step 7 without it and 34 more, ranks [0]" in found[at(5)]
    trees = [*reports_of(0, [5], "b", tuple(map(str, range(50)))), *reports_of(1, [5], "s", ("x",))]
    many = found_in(40, trees)[1]
    assert "and 46 more" in many[at(5)]


def test_what_is_remembered_is_bounded():
    attendance, _ = found_in(2, reports_of(0, range(500)))
    assert len(attendance.structures) == len(attendance.reports[0]) == MAX_REMEMBERED


@pytest.mark.parametrize(("local", "line"), [((), "['w'] (array float32[2,3])"), ((0,), "['w'] (array)")])
def test_leaves_are_described_as_far_as_ranks_must_agree(local, line):
    leaf = {"path": "['w']", "kind": "array", "dtype": "float32", "shape": [2, 3]}
    assert describe([leaf], local) == (line,)
    assert len(describe([leaf] * 5000, local)) == MAX_LEAVES
