"""Real stores and a real coordinator on a real cluster, with stub workers that write real buffers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from harness import CONFIG, ELEMENTS, flip_byte, stub_group
from support import eventually

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import (
    RestoreTimeoutError,
    SnapshotError,
    SnapshotLostError,
    SnapshotTimeoutError,
    StaleAttemptError,
)
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import StoredCheckpoint
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.system import process_alive, process_start_time


def kill_store(group, rank: int) -> None:
    os.kill(ray.get(group.store(rank).pid.remote()), signal.SIGKILL)


def expect(array: np.ndarray, step: int) -> None:
    np.testing.assert_array_equal(array, np.full(array.shape, step % 251, np.uint8))


def test_a_snapshot_becomes_protected_and_either_node_can_serve_all_of_it(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        assert group.begin().located is None
        assert group.wait(group.snapshot(10)) == (2, 2)
        assert group.latest() == 10
        located = ray.get(group.coordinator.locate.remote(group.generation(10), 0, group.decision.attempt))
        for rank in (0, 1):
            array, from_peers = group.read(located, rank)
            expect(array, 10)
            assert array.size == 2 * ELEMENTS
            assert not from_peers


def test_older_generations_are_freed_once_a_newer_one_is_as_safe(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        for step in (10, 20, 30, 40):
            group.wait(group.snapshot(step))
        eventually(lambda: group.held(0) == group.held(1) == {40})


def test_memory_stays_at_two_buffers_per_source(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        for step in range(1, 12):
            group.wait(group.snapshot(step))
        limit = 2 * 2 * (group.layout(0).num_bytes + 4096)
        assert all(ray.get(group.store(rank).held_bytes.remote()) <= limit for rank in (0, 1))


def test_an_incomplete_generation_is_never_restored(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        group.snapshot(20, ranks=[0])
        located = group.begin().located
        assert located is not None
        assert located.generation.step == 10
        expect(group.read(located, 0)[0], 10)


def test_a_dead_store_is_replaced_and_its_ranks_bytes_come_from_the_peer(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        kill_store(group, 1)
        located = group.begin().located
        assert located is not None
        array, from_peers = group.read(located, 1)
        expect(array, 10)
        assert from_peers
        # And it is brought back to two copies without a new snapshot.
        eventually(lambda: group.wait(located.generation) == (2, 2))
        kill_store(group, 0)
        located = group.begin().located
        assert located is not None
        expect(group.read(located, 0)[0], 10)


def test_a_store_that_dies_during_training_is_noticed_and_replaced(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        kill_store(group, 1)
        handle = ray.get(group.coordinator.replace_store.remote(1, 1), timeout=60)
        group.decision.stores[1] = handle
        eventually(lambda: group.wait(group.generation(10)) == (2, 2))
        assert group.wait(group.snapshot(20)) == (2, 2)


def test_the_loss_of_all_copies_starts_afresh_and_says_nothing_is_held(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        for rank in (0, 1):
            kill_store(group, rank)
        assert group.begin().located is None
        with pytest.raises(ray.exceptions.RayTaskError, match="not held completely") as caught:
            ray.get(group.coordinator.locate.remote(Generation(1, 0, 10), 0, group.decision.attempt))
        assert isinstance(caught.value, SnapshotLostError)


def test_a_damaged_copy_is_passed_over_for_the_good_one(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation = group.snapshot(10)
        group.wait(generation)
        flip_byte(group, 0, generation, "s0>1")
        located = group.begin().located
        assert located is not None
        array, from_peers = group.read(located, 0)
        expect(array, 10)
        assert from_peers


def test_when_every_copy_is_damaged_all_ranks_go_back_to_the_older_generation(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        # Rank 1 is late with step 20: until it comes, step 10 is kept.
        group.snapshot(20, ranks=[0])
        generation = group.generation(20)
        eventually(lambda: group.held(1) == {10, 20})
        for rank in (0, 1):
            flip_byte(group, rank, generation, "s0>1")
        grant = group.reserve(1, 20)
        kill_coordinator_reports(group)
        group.commit(1, 20, grant)
        located = group.start_coordinator().begin().located
        assert located is not None
        assert located.generation.step == 10
        expect(group.read(located, 0)[0], 10)


def kill_coordinator_reports(group) -> None:
    """Without a coordinator nothing is freed: the books of the next one come from the inventories."""
    pid = ray.get(group.coordinator.pid.remote())
    started = process_start_time(pid)
    ray.kill(group.coordinator)
    # On a busy machine it would live to hear of the next commit, and free what that replaces.
    eventually(lambda: not process_alive(pid, started))


def test_a_new_driver_takes_over_living_stores_with_the_next_attempt(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        first = group.begin()
        group.wait(group.snapshot(10))
        ray.kill(group.coordinator)
        second = group.start_coordinator().begin()
        assert second.attempt == first.attempt + 1
        assert second.secret == first.secret
        assert second.located is not None
        assert second.located.generation.step == 10
        assert group.wait(group.snapshot(20)) == (2, 2)


def test_an_older_attempt_can_write_nothing_any_more(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation, grant = group.generation(10), group.reserve(0, 10)
        stale = group.layout(0).num_bytes
        group.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="has been replaced") as caught:
            ray.get(group.store(0).begin.remote(1, generation, stale, "1:1", 1.0))
        assert isinstance(caught.value, StaleAttemptError)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"has been replaced|not being filled"):
            ray.get(group.store(0).commit.remote(1, grant.slot, b"{}"))


def test_a_killed_writers_buffer_passes_on_and_a_living_ones_does_not(nodes, run):
    writer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with stub_group(run, nodes[:2]) as group:
            group.begin()
            name = f"{writer.pid}:{process_start_time(writer.pid)}"
            group.wait(group.snapshot(10))
            ray.get(group.store(0).begin.remote(1, group.generation(20), 1000, name, 5.0))
            group.begin()
            with pytest.raises(ray.exceptions.RayTaskError, match=r"no free buffer .*stranded"):
                group.reserve(0, 30, timeout_s=1.0)
            writer.kill()
            writer.wait()
            assert group.reserve(0, 30)
    finally:
        writer.kill()
        writer.wait()


def test_a_skipped_step_is_abandoned_by_name_and_ranks_wait_from_then_on(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.snapshot(10, ranks=[0])
        ray.get(group.coordinator.abandon.remote(group.generation(10), "rank 1 was busy"))
        with pytest.raises(ray.exceptions.RayTaskError, match="step 10 was abandoned: rank 1 was busy") as caught:
            group.wait(group.generation(10))
        assert isinstance(caught.value, SnapshotError)
        group.wait(group.snapshot(20))
        assert not ray.get(group.coordinator.must_wait.remote())


def test_waiting_for_a_step_that_a_rank_does_not_take_names_what_is_missing(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.snapshot(10, ranks=[0])
        with pytest.raises(ray.exceptions.RayTaskError, match=r"no verified copy of \['h1'\]") as caught:
            group.wait(group.generation(10), timeout_s=1.0)
        assert isinstance(caught.value, SnapshotTimeoutError)


def test_ranks_confirm_what_they_restored_and_a_missing_one_is_named(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation = group.generation(10)
        refs = [group.coordinator.confirm.remote(rank, 1, 1, generation, 10.0) for rank in (0, 1)]
        ray.get(refs, timeout=30)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"ranks \[1\]") as caught:
            ray.get(group.coordinator.confirm.remote(0, 1, 2, generation, 0.5), timeout=30)
        assert isinstance(caught.value, RestoreTimeoutError)
        refs = [group.coordinator.confirm.remote(r, 1, 3, group.generation(10 + r), 5.0) for r in (0, 1)]
        with pytest.raises(ray.exceptions.RayTaskError, match="different snapshots"):
            ray.get(refs, timeout=30)
        # From storage: the same place, and different ones.
        for number, places in ((4, ("a/c", "a/c")), (5, ("a/c", "b/c"))):
            stored = [StoredCheckpoint(path, 7) for path in places]
            refs = [group.coordinator.confirm.remote(r, 1, number, one, 5.0) for r, one in enumerate(stored)]
            if number == 4:
                ray.get(refs, timeout=30)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"'a/c of step 7'.*'b/c of step 7'"):
            ray.get(refs, timeout=30)


def test_two_runs_on_one_cluster_do_not_see_each_other(nodes, run):
    with stub_group(run, nodes[:2]) as one, stub_group(f"{run}b", nodes[:2]) as other:
        one.begin()
        one.wait(one.snapshot(10))
        assert other.begin().located is None
        assert other.decision.secret != one.decision.secret
        assert len(fleet.living_stores(run)) == 2


def test_workers_move_to_another_node_while_the_old_nodes_store_lives_on(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        group.nodes = [nodes[0], nodes[2]]
        located = group.begin().located
        assert located is not None
        array, from_peers = group.read(located, 1)
        expect(array, 10)
        assert from_peers
        for step in (20, 30, 40, 50):
            assert group.wait(group.snapshot(step)) == (2, 2)
        # The old one has nothing that anybody needs any more, and ends.
        eventually(lambda: len(fleet.living_stores(run)) == 2)


def test_a_store_that_dies_before_its_push_is_done_stops_nothing(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        # Its peer takes no bytes, so that step 20 has one copy of what the other rank holds when that one dies.
        peer = ray.get(group.store(0).pid.remote())
        os.kill(peer, signal.SIGSTOP)
        try:
            group.snapshot(20, ranks=[1])
            kill_store(group, 1)
        finally:
            os.kill(peer, signal.SIGCONT)
        group.snapshot(20, ranks=[0])
        group.decision.stores[1] = ray.get(group.coordinator.replace_store.remote(1, 1), timeout=60)
        for step in (30, 40, 50):
            assert eventually(lambda step=step: group.wait(group.snapshot(step)) == (2, 2))


def test_a_push_that_gave_up_is_made_up_for(nodes, run):
    with stub_group(run, nodes[:2], CONFIG.model_copy(update={"timeout_s": 1.0})) as group:
        group.begin()
        group.wait(group.snapshot(10))
        peer = ray.get(group.store(1).pid.remote())
        grant = group.reserve(1, 20)
        group.commit(1, 20, grant)
        os.kill(peer, signal.SIGSTOP)
        try:
            group.commit(0, 20, group.reserve(0, 20))
            time.sleep(12)  # four tries and their pauses
        finally:
            os.kill(peer, signal.SIGCONT)
        assert group.wait(group.generation(20)) == (2, 2)
        assert group.wait(group.snapshot(30)) == (2, 2)


def test_a_healthy_store_is_not_replaced_and_an_older_attempt_replaces_nothing(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        pid = ray.get(group.store(1).pid.remote())
        same = ray.get(group.coordinator.replace_store.remote(1, 1), timeout=60)
        assert ray.get(same.pid.remote()) == pid
        group.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="has been replaced"):
            ray.get(group.coordinator.replace_store.remote(1, 1), timeout=60)


def test_stores_that_are_stopped_for_a_while_are_waited_for_and_nothing_starts_afresh(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        pids = [ray.get(group.store(rank).pid.remote()) for rank in (0, 1)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        decision = group.coordinator.begin_attempt.remote(group.members)
        time.sleep(3)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        located = ray.get(decision, timeout=60).located
        assert located is not None
        assert located.generation.step == 10


def test_a_driver_that_only_looks_takes_no_reports_away(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        first = group.coordinator
        ray.get(group.start_coordinator().coordinator.open.remote(), timeout=60)
        ray.kill(group.coordinator)
        group.coordinator = first
        for step in (20, 30, 40):
            assert group.wait(group.snapshot(step)) == (2, 2)


def test_a_killed_coordinator_comes_back_and_snapshots_go_on(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        os.kill(ray.get(group.coordinator.pid.remote()), signal.SIGKILL)
        for step in (20, 30, 40):
            group.snapshot(step)
        eventually(lambda: answer(group.latest) == 40)
        eventually(lambda: group.held(0) == group.held(1) == {40})
        located = group.begin().located
        assert located is not None
        assert located.generation.step == 40
        assert group.decision.attempt == 2


def answer(question):
    """What an actor says, or None while it is being started again."""
    try:
        return question()
    except ray.exceptions.RayActorError:
        return None


def test_a_coordinator_that_was_killed_still_knows_the_group_and_lets_go_of_a_step_that_it_forgot_was_skipped(
    nodes, run
):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        # Rank 1 skips the next step, and whom it told is killed.
        group.snapshot(20, [0])
        ray.get(group.coordinator.abandon.remote(group.generation(20), "skipped by rank 1"))
        os.kill(ray.get(group.coordinator.pid.remote()), signal.SIGKILL)
        eventually(lambda: answer(group.latest) == 10)
        kill_store(group, 0)
        group.decision.stores[0] = ray.get(group.coordinator.replace_store.remote(0, 1), timeout=60)
        for step in (30, 40, 50):
            assert group.wait(group.snapshot(step)) == (2, 2)
        eventually(lambda: group.held(0) == group.held(1) == {50})


def test_a_complete_generation_is_not_abandoned_by_a_rank_that_lost_the_answer(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        ray.get(group.coordinator.abandon.remote(group.generation(10), "no answer"))
        assert group.latest() == 10


def test_a_handle_whose_copies_are_damaged_is_not_restored(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        generation = group.snapshot(10)
        group.wait(generation)
        flip_byte(group, 0, generation, "s0>1")
        located = ray.get(group.coordinator.locate.remote(generation, 0, 1))
        expect(group.read(located, 0)[0], 10)
        # Of another one, since the bad copy is being repaired.
        generation = group.snapshot(20)
        group.wait(generation)
        for rank in (0, 1):
            flip_byte(group, rank, generation, "s0>1")
        with pytest.raises(ray.exceptions.RayTaskError, match="not held completely"):
            ray.get(group.coordinator.locate.remote(generation, 0, 1))


def test_one_copy_needs_no_peer(nodes, run):
    with stub_group(run, nodes[:2], CONFIG.model_copy(update={"copies": 1})) as group:
        group.begin()
        assert group.wait(group.snapshot(10)) == (1, 1)
        view, _ = ray.get(group.store(1).view.remote(group.generation(10)))
        assert set(view.places) == {"s1>", "h1"}


def test_a_store_process_never_loads_jax(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        group.wait(group.snapshot(10))
        maps = Path(f"/proc/{ray.get(group.store(0).pid.remote())}/maps").read_text()
        assert "arrow_flight" in maps
        assert "jaxlib" not in maps


def test_a_finished_run_leaves_no_store_behind(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        pids = [ray.get(group.store(rank).pid.remote()) for rank in (0, 1)]
        started = [process_start_time(pid) for pid in pids]
        ray.get(group.coordinator.finish.remote(keep=False))
        eventually(lambda: not any(process_alive(p, s) for p, s in zip(pids, started, strict=True) if s))
        eventually(lambda: fleet.living_stores(run) == {})


def test_a_driver_that_was_replaced_ends_no_store_of_its_successor(nodes, run):
    with stub_group(run, nodes[:2]) as group:
        group.begin()
        replaced = group.coordinator
        group.start_coordinator().begin()
        group.wait(group.snapshot(10))
        ray.get(replaced.finish.remote(keep=False), timeout=60)
        ray.kill(replaced)
        assert group.wait(group.snapshot(20)) == (2, 2)


def test_stores_end_themselves_when_nobody_takes_them_over(nodes, run):
    with stub_group(run, nodes[:2], SnapshotConfig(timeout_s=5, orphan_timeout_s=1)) as group:
        group.begin()
        pids = [ray.get(group.store(rank).pid.remote()) for rank in (0, 1)]
        started = [process_start_time(pid) for pid in pids]
        ray.kill(group.coordinator)
        eventually(lambda: not any(process_alive(p, s) for p, s in zip(pids, started, strict=True) if s))
