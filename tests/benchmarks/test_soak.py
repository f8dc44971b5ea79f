"""What the soak kills, and what it takes for a recovery, from logs written here: no cluster."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
import soak
from bench.soak_job import Log


@pytest.fixture
def chaos(tmp_path):
    return soak.Chaos(tmp_path, [], time.monotonic() + 60)


@pytest.fixture
def worker(tmp_path):
    """A process that the log says to be rank 1 since its last start."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        for pid in (2**30, process.pid):
            Log(tmp_path / "rank1.jsonl").add("started", step=0, pid=pid, node="here")
        yield process
        process.kill()


def test_the_same_seed_kills_the_same_and_each_kind_that_may_be_killed():
    kills = soak.plan_kills(3, ["store", "node"], 40)
    assert kills == soak.plan_kills(3, ["store", "node"], 40) != soak.plan_kills(4, ["store", "node"], 40)
    assert {kind for kind, _, _ in kills} == {"store", "node"}
    assert {rank for _, rank, _ in kills} == {0, 1}


def test_the_worker_that_was_started_last_is_killed(chaos, worker):
    before = time.time()
    begun, dead = chaos._kill("worker", 1)
    assert before <= begun <= dead <= time.time()
    assert not psutil.pid_exists(worker.pid) or psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE


def test_a_snapshot_counts_when_both_ranks_protected_one_beyond_the_step_after_the_kill(chaos, tmp_path):
    logs = [Log(tmp_path / f"rank{rank}.jsonl") for rank in (0, 1)]
    for log in logs:
        log.add("protected", step=10)
    killed = time.time()
    logs[0].add("protected", step=15)
    logs[0].add("protected", step=20)
    logs[1].add("protected", step=15)
    assert chaos._protected(killed, 15) is None
    logs[1].add("protected", step=20)
    assert killed < chaos._protected(killed, 15) <= time.time()


@pytest.mark.parametrize(
    ("restored", "started", "problem"),
    [
        ([10, 5], [], "different steps"),
        ([5, 5], [], "step 10 was protected, and 5 was restored"),
        ([10, 10], [0], "started afresh"),
    ],
)
def test_a_restore_that_is_wrong_fails_the_soak(chaos, tmp_path, restored, started, problem):
    for rank, step in enumerate(restored):
        Log(tmp_path / f"rank{rank}.jsonl").add("restored", step=step, source="memory:local", problem="")
    for step in started:
        Log(tmp_path / "rank0.jsonl").add("started", step=step)
    with pytest.raises(AssertionError, match=problem):
        chaos._check_restore(0, 10)


def test_bytes_that_differ_fail_the_soak(chaos, tmp_path):
    for rank, problem in enumerate(("", "leaf x differs")):
        Log(tmp_path / f"rank{rank}.jsonl").add("restored", step=10, source="memory:local", problem=problem)
    with pytest.raises(AssertionError, match="leaf x differs"):
        chaos._check_restore(0, 10)


def test_the_summary_is_of_each_kind():
    kills = [{"kind": "store", "recovery_s": s} for s in (1, 9, 2)]
    kills.append({"kind": "node", "recovery_s": 5, "steps_lost": 4})
    assert soak.summarize(kills) == {
        "store": {"kills": 3, "recovery_s": {"median": 2, "max": 9}, "steps_lost": None},
        "node": {"kills": 1, "recovery_s": {"median": 5, "max": 5}, "steps_lost": {"median": 4, "max": 4}},
    }
