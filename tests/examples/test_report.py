from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gpt.compare import compare, compare_states, draw, losses_by_step, save_final_state
from gpt.faults import Death, Fault, plan_faults
from gpt.progress import Progress, read_package_events, read_progress
from gpt.recovery import PHASES, describe, recoveries

DEATHS = [Death("worker", 12, 1, 100.0, 11, "a" * 56), Death("node", 22, 0, 200.0, 12, "b" * 56, 4)]


def record(time: float, event: str, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "rank": rank, **fields}


def attempt(start: float, first: int, last: int, source: str | None) -> list[dict[str, Any]]:
    """One attempt of two ranks: a second for each thing, rank 1 a tenth later."""
    records = []
    for rank in (0, 1):
        time = start + rank / 10
        records.append(record(time, "entered", rank))
        if source is not None:
            records.append(record(time + 1, "restoring", rank))
            records.append(record(time + 2, "restored", rank, step=first - 1, source=source))
        for step in range(first, last + 1):
            records.append(record(time + 3 + step - first, "step", rank, step=step, loss=(1 / step).hex()))
    return records


def progress_of_two_deaths() -> list[dict[str, Any]]:
    records = attempt(80, 1, 12, None) + attempt(120, 11, 22, "memory:local") + attempt(230, 21, 30, "memory:peer")
    return sorted(records, key=lambda r: r["time"])


def package_events() -> list[dict[str, Any]]:
    names = ("worker_group_failed", "worker_group_shutdown", "worker_group_start", "workers_ready", "backend_ready")
    return [
        {"time": start + i, "event": name}
        for start in (0, 102, 203)
        for i, name in enumerate(names)
        if (start, i) != (0, 0)
    ]


def test_recoveries_take_each_phase_from_its_own_attempt() -> None:
    first, second = recoveries(DEATHS, progress_of_two_deaths(), package_events())
    assert (first.step, first.source, first.num_steps_lost) == (10, "memory:local", 2)
    assert (second.step, second.source, second.num_steps_lost) == (20, "memory:peer", 2)
    expected = [2, 1, 2, 1, 15, 1.1, 1, 2]
    assert [first.seconds[phase] for phase in PHASES] == pytest.approx(expected)
    assert first.total_s == pytest.approx(sum(expected))


def test_missing_time_stamps_are_question_marks() -> None:
    first, _ = recoveries(DEATHS, progress_of_two_deaths(), [])
    assert first.seconds["notice"] is None
    assert first.seconds["restore"] == pytest.approx(1.1)
    assert "notice ?" in describe(first)
    (nothing,) = recoveries(DEATHS[:1], [], [])
    assert "nothing" in describe(nothing)


def test_different_sources_are_named_by_rank() -> None:
    records = attempt(120, 11, 22, "memory:local")
    for entry in records:
        if entry["event"] == "restored" and entry["rank"] == 1:
            entry["source"] = "memory:peer"
    (recovery,) = recoveries(DEATHS[:1], records, [])
    assert recovery.source == "rank 0 memory:local, rank 1 memory:peer"


def test_description_says_what_died_and_what_was_restored() -> None:
    text = "\n".join(describe(r) for r in recoveries(DEATHS, progress_of_two_deaths(), package_events()))
    assert "worker process 11 of rank 1" in text
    assert "node bbbbbbbb with rank 0 (4 processes" in text
    assert "restored step 10 from memory:local; died in step 13: 2 finished steps lost" in text


def test_progress_round_trip_skips_half_written_lines(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == []
    assert read_package_events(tmp_path) == []
    Progress(tmp_path, 1, "node").step(3, 0.1)
    with (tmp_path / "progress" / "rank-1.jsonl").open("a") as file:
        file.write('{"time": 1, "eve')
    (found,) = read_progress(tmp_path)
    assert (found["rank"], found["step"], float.fromhex(found["loss"])) == (1, 3, 0.1)


def save_state(folder: Path, value: float) -> None:
    save_final_state(folder, 0, {"w": jax.numpy.full((4, 2), value), "key": jax.random.key(3)})


def test_equal_runs_are_identical(tmp_path: Path) -> None:
    save_state(tmp_path / "a", 1.0)
    save_state(tmp_path / "b", 1.0)
    reference = attempt(0, 1, 30, None)
    result = compare((tmp_path / "a", progress_of_two_deaths()), (tmp_path / "b", reference), 30)
    assert result.differences == []
    assert result.identical
    assert result.num_repeated == 2 * 4
    assert result.num_arrays >= 2


@pytest.mark.parametrize("what", ["repeated loss", "missing step", "state", "state sign of zero", "state file"])
def test_every_difference_is_found(tmp_path: Path, what: str) -> None:
    save_state(tmp_path / "a", 0.0)
    values = {"state": np.nextafter(np.float32(0), np.float32(1)).item(), "state sign of zero": -0.0}
    save_state(tmp_path / "b", values.get(what, 0.0))
    interrupted, reference = progress_of_two_deaths(), attempt(0, 1, 30, None)
    if what == "repeated loss":
        losses = [r for r in interrupted if r["event"] == "step" and r["step"] == 11 and r["rank"] == 1]
        losses[0]["loss"] = np.nextafter(1 / 11, 1).item().hex()  # the one that was lost, not the one that counts
    if what == "missing step":
        interrupted = [r for r in interrupted if r.get("step") != 25]
    if what == "state file":
        (tmp_path / "b" / "final" / "rank-0.npz").unlink()
    result = compare((tmp_path / "a", interrupted), (tmp_path / "b", reference), 30)
    assert not result.identical
    assert result.differences


def test_nothing_to_compare_is_not_identical(tmp_path: Path) -> None:
    assert compare_states(tmp_path, tmp_path) == (0, 0, [])
    assert not compare((tmp_path, []), (tmp_path, []), 0).identical


def test_nan_equals_itself(tmp_path: Path) -> None:
    save_state(tmp_path / "a", float("nan"))
    save_state(tmp_path / "b", float("nan"))
    assert compare_states(tmp_path / "a" / "final", tmp_path / "b" / "final")[2] == []


def test_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "x.png", progress_of_two_deaths(), attempt(0, 1, 30, None), DEATHS)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_losses_of_one_rank_keep_their_order() -> None:
    losses = losses_by_step(progress_of_two_deaths())
    assert len(losses[11]) == 2
    assert len(losses[13]) == 1


def test_plan_leaves_a_snapshot_before_each_fault() -> None:
    assert plan_faults(120, 5) == [Fault("worker", 52, 1), Fault("node", 87, 0)]
    assert len(plan_faults(120, 5, nodes=False)) == 1
    for every in (1, 2, 3, 5, 10):
        worker, node = plan_faults(10 * every, every)
        assert 2 * every <= worker.step < node.step < 10 * every


def test_plan_refuses_too_few_steps() -> None:
    with pytest.raises(ValueError, match="at least 50 steps, or --no-faults"):
        plan_faults(20, 5)
