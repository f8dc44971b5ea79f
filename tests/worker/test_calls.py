"""snapshot, restore, wait and latest in a group of one, with a real coordinator and store."""

from __future__ import annotations

import gc
import math
import os
import tempfile
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pyarrow.fs
import pytest
import ray
import ray.data
import ray.train
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint, UndecidedCheckpoint
from ray_jax_ckpt.errors import (
    ConfigError,
    DataStateError,
    MemoryLimitError,
    NoCheckpointError,
    RestoreError,
    SnapshotError,
    SnapshotLostError,
    SnapshotTimeoutError,
    StepError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.arena import open_segment
from ray_jax_ckpt.model.shards import Generation

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))


def state_of(step):
    """Each step's differs in every array."""
    return {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8) + step, NamedSharding(MESH, P("fsdp"))),
        "b": jax.device_put(jnp.full(3, step, jnp.bfloat16), NamedSharding(MESH, P())),
        "key": jax.random.key(step),
        "empty": jax.device_put(jnp.zeros((4, 0, 2)), NamedSharding(MESH, P("fsdp"))),
        "n": np.full(3, step),
        "step": step,
        "name": "run",
        "nothing": None,
    }


def data_of(x):
    return (
        jax.random.key_data(x)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
    )


def assert_state(found, step):
    wanted = state_of(step)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(np.asarray(data_of(a)), np.asarray(data_of(b)))
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)


class Batches:
    """A data iterator with a position."""

    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position, "order": np.arange(3)}

    def set_state(self, state):
        assert state["order"].tolist() == [0, 1, 2]
        self.position = state["position"]


# --- taking snapshots


def test_a_run_that_has_taken_nothing_waits_for_nothing(attempts):
    attempts.begin()
    assert rjc.latest() is None
    rjc.wait()


def test_a_snapshot_comes_back_in_the_same_process_and_in_the_next_attempt(attempts):
    attempts.begin()
    handle = rjc.snapshot(3, state_of(3), data=Batches(7), metrics={"loss": jnp.float32(1.5)})
    assert isinstance(handle, ray.train.Checkpoint)
    assert handle.step == 3
    # It waits by itself until the snapshot is complete.
    restored = rjc.restore(handle, state_of(0))
    assert_state(restored.state, 3)
    assert (restored.step, restored.source, restored.metrics) == (3, "memory:local", {"loss": 1.5})
    rjc.wait()
    assert rjc.latest() == 3

    session = attempts.begin()
    assert session.decision.located.generation == handle.generation
    batches = Batches()
    restored = rjc.restore(SnapshotCheckpoint(session.decision.located.generation), state_of(0), data=batches)
    assert_state(restored.state, 3)
    assert batches.position == restored.data["position"] == restored.data_by_rank[0]["position"] == 7
    assert (restored.source, restored.metrics) == ("memory:local", {"loss": 1.5})


def test_only_due_steps_are_taken(attempts):
    attempts.begin(every_n_steps=5)
    assert [step for step in range(12) if rjc.snapshot(step, {"x": step})] == [0, 5, 10]
    assert rjc.snapshot(11, {"x": 11}, force=True).step == 11
    rjc.wait()
    assert rjc.latest() == 11


def test_the_same_step_again_is_the_same_snapshot(attempts):
    session = attempts.begin()
    # The previous snapshot has to be stored before the next; here it never is, so that metrics come in time.
    release, begin = threading.Event(), session._pipeline._store_job
    session._pipeline._store_job = lambda job: (release.wait(60), begin(job))[1]
    handle = rjc.snapshot(1, {"x": 1}, metrics={"loss": 1.0})
    again = rjc.snapshot(1, {"x": "other"}, metrics={"accuracy": 0.5})
    release.set()
    assert again is handle
    restored = rjc.restore(handle)
    assert restored.state == {"x": 1}
    assert restored.metrics == {"loss": 1.0, "accuracy": 0.5}


def test_calls_from_two_threads_are_one_after_the_other(attempts):
    session = attempts.begin()
    submit, inside, release = session._pipeline.submit, threading.Event(), threading.Event()
    session._pipeline.submit = lambda job: (inside.set(), release.wait(60), submit(job))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rjc.snapshot, 1, {"x": 1})
        assert inside.wait(60)
        second = pool.submit(rjc.snapshot, 2, {"x": 2})
        assert not wait([second], 0.3).done
        release.set()
        assert (first.result(60).step, second.result(60).step) == (1, 2)
    assert rjc.restore(second.result()).state == {"x": 2}


def test_steps_only_go_back_after_a_restore(attempts):
    attempts.begin()
    first = rjc.snapshot(4, {"x": 4})
    rjc.wait()
    rjc.snapshot(6, {"x": 6})
    with pytest.raises(StepError, match=r"Step 5 comes after step 6.*restore"):
        rjc.snapshot(5, {"x": 5})
    rjc.wait()
    eventually(lambda: attempts.held_steps() == {6})
    with pytest.raises(SnapshotLostError, match=r"Step 4 .*complete steps: \[6\]"):
        rjc.restore(first)
    assert rjc.restore(rjc.snapshot(6, None)).state == {"x": 6}
    with pytest.raises(StepError, match="Step 5 comes after step 6"):
        rjc.snapshot(5, {"x": 5})
    # The restored step again is a new snapshot, of a new line.
    handle = rjc.snapshot(6, {"x": -6})
    assert handle.generation == Generation(1, 1, 6)
    assert rjc.restore(handle).state == {"x": -6}


def test_what_was_decided_is_gone_once_newer_steps_have_replaced_it(attempts):
    attempts.begin()
    rjc.snapshot(4, {"x": 4})
    rjc.wait()
    decided = SnapshotCheckpoint(attempts.begin().decision.located.generation)
    rjc.snapshot(9, {"x": 9})
    rjc.wait()
    assert rjc.latest() == 9
    eventually(lambda: attempts.held_steps() == {9})
    with pytest.raises(SnapshotLostError, match=r"Step 4 .*complete steps: \[9\]"):
        rjc.restore(decided)
    assert rjc.restore(SnapshotCheckpoint(Generation(2, 0, 9))).state == {"x": 9}


def test_a_step_lower_than_the_attempt_s_last_one_may_follow_a_restore(attempts):
    attempts.begin()
    rjc.snapshot(4, {"x": 4})
    rjc.wait()
    decided = SnapshotCheckpoint(attempts.begin(every_n_steps=10).decision.located.generation)
    assert rjc.restore(decided).step == 4
    # Nothing is stored before the second restore, which may so find the same again.
    assert rjc.snapshot(7, {"x": 7}) is None
    assert rjc.restore(decided).step == 4
    handle = rjc.snapshot(5, {"x": 5}, force=True)
    assert handle.generation == Generation(2, 2, 5)
    rjc.wait()
    assert rjc.latest() == 5


def test_a_step_is_an_int(attempts):
    attempts.begin()
    for step in (True, 1.0, "1", None, np.float32(1), jnp.float32(1), np.bool_(True)):
        with pytest.raises(StepError, match="must be an int"):
            rjc.snapshot(step, {})
    with pytest.raises(StepError, match="negative, got -1"):
        rjc.snapshot(-1, {})
    for step in (np.int64(7), jnp.int32(8)):
        handle = rjc.snapshot(step, {"x": 1})
        assert type(handle.step) is int
        assert rjc.restore(handle).step == step


def test_the_state_at_the_call_is_kept_whatever_happens_to_it_next(attempts):
    attempts.begin()
    big = jnp.arange(2.0**20)
    state = {"w": jax.device_put(big, NamedSharding(MESH, P("fsdp"))), "d": big + 1, "n": np.arange(2.0**18)}
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    handle = rjc.snapshot(1, state)
    state["n"][:] = -1
    state["w"] = step(step(state["w"]))
    state["d"].delete()
    restored = rjc.restore(handle).state
    np.testing.assert_array_equal(restored["w"], np.arange(2.0**20))
    np.testing.assert_array_equal(restored["d"], np.arange(2.0**20) + 1)
    np.testing.assert_array_equal(restored["n"], np.arange(2.0**18))


@pytest.mark.parametrize("staging", ["host", "device"])
def test_steps_that_donate_their_state_do_not_reach_snapshots(attempts, staging):
    session = attempts.begin(staging=staging)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    state = {"w": state_of(0)["w"], "tiny": {f"{i:02d}": jnp.full(i + 1, i, jnp.bfloat16) for i in range(30)}}
    for number in range(1, 5):
        state = step(state)
        wanted = jax.tree.map(np.array, state)
        handle = rjc.snapshot(number, state)
        state = step(step(state))
        session.drain(20)
        # After the first one the programs are compiled, in the background.
        eventually(lambda: session._planner._plan.staging.is_ready)
        assert session._planner._plan.staging.whole == (staging == "device")
    restored = rjc.restore(handle).state
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


def test_restored_arrays_do_not_change_with_the_store_s_memory(attempts):
    attempts.begin()
    x = jnp.arange(2.0**18)
    first = rjc.restore(rjc.snapshot(1, {"x": x}), {"x": x}).state["x"]
    for step in range(2, 8):
        rjc.snapshot(step, {"x": x - 1000 * step})
        rjc.wait()
    np.testing.assert_array_equal(first, x)
    jax.jit(lambda x: x + 1, donate_argnums=0)(first)
    assert first.is_deleted()


def test_a_changed_tree_is_taken_as_it_is(attempts):
    attempts.begin()
    for step, state in enumerate([{"a": jnp.ones(3)}, {"a": jnp.ones(5), "b": 1}, {"a": jnp.ones(5, jnp.int8)}, {}], 1):
        restored = rjc.restore(rjc.snapshot(step, state), state)
        assert jax.tree.map(lambda x: str(getattr(x, "dtype", x)), restored.state) == jax.tree.map(
            lambda x: str(getattr(x, "dtype", x)), state
        )


def test_metrics_that_cannot_be_had_cost_no_snapshot(attempts, caplog):
    attempts.begin()
    gone = jnp.float32(1)
    gone.delete()
    given = {"loss": np.float32(0.5), "who": "me", "eval": {"acc": jnp.bfloat16(0.5), "bad": math.nan}, "gone": gone}
    found = rjc.restore(rjc.snapshot(1, {"x": 1}, metrics=given)).metrics
    assert found["loss"] == found["eval"]["acc"] == 0.5
    assert (found["who"], math.isnan(found["eval"]["bad"]), "gone" in found) == ("me", True, False)
    assert "'gone' of step 1" in caplog.text


def test_metrics_that_cannot_be_stored_are_refused_by_name(attempts):
    attempts.begin().storage.score = "eval.loss"
    for value in (np.ones(3), {1}, jnp.ones(1)):
        with pytest.raises(rjc.errors.ConfigError, match="metric 'eval/loss' is a"):
            rjc.snapshot(1, {"x": 1}, metrics={"eval": {"loss": value}})
    with pytest.raises(rjc.errors.ConfigError, match=r"ranked by the metric 'eval\.loss', which must be a number"):
        rjc.snapshot(1, {"x": 1}, metrics={"eval": {"loss": "x"}})
    with pytest.raises(rjc.errors.ConfigError, match="takes a dictionary by name"):
        rjc.snapshot(1, {"x": 1}, metrics=[])


# --- what cannot be taken


@pytest.mark.parametrize("force", [False, True])
def test_a_refused_state_or_data_leaves_nothing_behind(attempts, force):
    attempts.begin()
    rjc.snapshot(1, {"x": 1})
    deleted = jnp.ones(3)
    deleted.delete()
    for _ in range(4):
        with pytest.raises(UnsupportedLeafError, match=r"\['layers'\]\[0\]\['act'\].*functions"):
            rjc.snapshot(2, {"layers": [{"act": print}]}, force=force)
        with pytest.raises(DataStateError, match=r"data= of type object cannot be saved.*get_state"):
            rjc.snapshot(2, {"x": 1}, data=object(), force=force)
        with pytest.raises(RuntimeError, match="has been deleted"):
            rjc.snapshot(2, {"x": deleted}, force=force)
    # Every buffer of the store is still to be had.
    for step in (2, 3, 4):
        rjc.snapshot(step, {"x": step}, force=force)
        rjc.wait()
    assert rjc.latest() == 4


def test_plain_values_as_data(attempts):
    attempts.begin()
    values = [{"position": 3, "epoch": (1, None), "seed": 2**70}, [1, 2], "text", np.arange(3), 0]
    for step, data in enumerate(values):
        restored = rjc.restore(rjc.snapshot(step, {}, data=data))
        np.testing.assert_equal(restored.data, data)
        np.testing.assert_equal(dict(restored.data_by_rank), {0: data})


def test_data_is_taken_at_the_call(attempts):
    attempts.begin()
    batches, plain = Batches(5), {"list": [1]}
    handle = rjc.snapshot(1, {}, data=batches)
    batches.position = 6
    rjc.restore(handle, data=batches)
    assert batches.position == 5
    handle = rjc.snapshot(2, {}, data=plain)
    plain["list"].append(2)
    assert rjc.restore(handle).data == {"list": [1]}


def test_data_that_cannot_be_put_back(attempts):
    attempts.begin()
    handle = rjc.snapshot(1, {})
    with pytest.raises(DataStateError, match="holds no data= of this rank"):
        rjc.restore(handle, data=Batches())
    with pytest.raises(DataStateError, match=r"type dict has no set_state.*Restored\.data"):
        rjc.restore(handle, data={})
    assert rjc.restore(handle).data is None


@pytest.fixture(scope="module")
def ray_data(cluster):
    """A dataset, and what a train function gets of it from `ray.train.get_dataset_shard`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Data warns of its own settings
        dataset = ray.data.range(8)
        (split,) = dataset.streaming_split(1)
        yield {"split": split, "iterator": dataset.iterator(), "batches": split.iter_batches(), "dataset": dataset}


@pytest.mark.parametrize("kind", ["split", "iterator", "batches", "dataset"])
def test_ray_data_is_refused_with_what_to_do_instead(attempts, ray_data, kind):
    attempts.begin()
    for data in (ray_data[kind], {"train": [ray_data[kind]]}):
        with pytest.raises(
            DataStateError,
            match=r"is a Ray Data .*data=\{'epoch': epoch, 'batches': batches\}.*islice.*preserve_order.*grain",
        ):
            rjc.snapshot(1, {"x": 1}, data=data)


def test_large_data_travels_beside_the_index_and_counts_as_memory(attempts):
    session = attempts.begin(max_bytes=6_000_000)
    large = {"buffer": b"b" * 1_500_000, "order": np.arange(10), "text": "t" * 50_000}
    handle = rjc.snapshot(1, {"x": 1}, data=large)
    rjc.wait()
    located = ray.get(session.coordinator.locate.remote(handle.generation, 0, 1), timeout=30)
    assert len(located.indices[0]) < 2000
    np.testing.assert_equal(rjc.restore(handle).data, large)
    # Two buffers and staging.
    with pytest.warns(RuntimeWarning, match=r"step 2 skipped: rank 0 on node .* memory.*max_bytes allows 6 MB"):
        assert rjc.snapshot(2, {"x": 1}, data={"buffer": b"b" * 2_200_000}) is None
    with pytest.raises(DataStateError, match=r"300000000 bytes.*max_data_bytes allows 268435456"):
        rjc.snapshot(2, {"x": 1}, data=b"b" * 300_000_000)


def test_damaged_data_is_not_restored(attempts):
    attempts.begin()
    rjc.snapshot(1, {"x": 1}, data=b"b" * 100_000, force=True)
    rjc.wait()
    handle = rjc.snapshot(2, {"x": 2}, data=b"b" * 100_000)
    rjc.wait()
    view, _ = ray.get(attempts.store().view.remote(handle.generation), timeout=30)
    place = view.places["h0"]
    with open_segment(place.segment, writable=True) as mapping:
        mapping.view()[place.offset + 50_000] ^= 1
    with pytest.raises(SnapshotLostError, match="Step 2"):
        rjc.restore(handle)


class Files:
    """Orbax's StatefulCheckpointable."""

    def __init__(self, number=0, error=None):
        self.number, self.error = number, error

    async def save(self, directory):
        return self._write(directory, self.number)

    async def _write(self, directory, number):
        if self.error:
            raise self.error
        ((await directory.await_creation()) / "number").write_text(str(number))

    async def load(self, directory):
        self.number = int((directory / "number").read_text())


@pytest.mark.parametrize("force", [False, True])
def test_files_of_data_are_those_of_the_call(attempts, force):
    attempts.begin()
    files, fresh = {"it": Files(5)}, {"it": Files()}
    handle = rjc.snapshot(1, {"x": 1}, data=files, force=force)
    files["it"].number = 6
    restored = rjc.restore(handle, data=fresh)
    assert fresh["it"].number == 5
    assert restored.data == restored.data_by_rank[0] == {"it": {"number": b"5"}}
    assert list(Path(tempfile.gettempdir()).glob(f"rjc-data-{os.getpid()}-*")) == []


def test_files_that_cannot_be_saved_cost_the_snapshot_and_not_the_training(attempts, recwarn):
    attempts.begin()
    rjc.snapshot(1, {"x": 1}, data=Files(1))
    rjc.wait()
    rjc.snapshot(2, {"x": 2}, data=Files(2, OSError("disk full")))
    with pytest.raises(SnapshotError, match=r"Files could not be saved.*disk full"):
        rjc.wait()
    with pytest.raises(SnapshotError, match=r"Files could not be saved.*disk full"):
        rjc.snapshot(3, {"x": 3}, data=Files(3, OSError("disk full")), force=True)
    assert rjc.latest() == 1
    handle = rjc.snapshot(4, {"x": 4}, data=Files(4))
    assert rjc.restore(handle).data == {"number": b"4"}
    assert list(Path(tempfile.gettempdir()).glob(f"rjc-data-{os.getpid()}-*")) == []


def test_more_memory_than_allowed_is_an_error_with_the_numbers(attempts):
    attempts.begin(max_bytes=8_000_000)
    with pytest.raises(MemoryLimitError, match=r"12 MB on this node.*max_bytes allows 8 MB.*copies \(now 1\)"):
        rjc.snapshot(1, {"x": jnp.ones(1_000_000)})
    rjc.snapshot(1, {"x": jnp.ones(1000)})
    rjc.wait()
    assert rjc.latest() == 1


# --- force


def test_a_forced_snapshot_is_kept_until_its_handle_is_gone(attempts):
    attempts.begin()
    kept = []
    for step in (1, 2):
        kept.append(rjc.snapshot(step, {"x": step}, force=True))
        rjc.wait()
    # One that is kept does not stop snapshots; of two, neither buffer is free although newer ones have replaced them.
    rjc.snapshot(3, {"x": 3})
    rjc.wait()
    eventually(lambda: attempts.held_steps() == {3})
    with pytest.raises(SnapshotTimeoutError, match="no free buffer"):
        rjc.snapshot(4, {"x": 4}, force=True, timeout_s=0.1)
    assert rjc.latest() == 3
    kept.clear()
    gc.collect()
    handle = rjc.snapshot(5, {"x": 5}, force=True)
    rjc.wait()
    assert rjc.latest() == 5
    assert rjc.restore(handle).state == {"x": 5}


def test_forcing_the_step_that_was_just_taken_keeps_it(attempts):
    attempts.begin()
    handle = rjc.snapshot(1, {"x": 1})
    for _ in range(2):
        assert rjc.snapshot(1, {"x": 1}, force=True) is handle
    for step in (2, 3):
        rjc.snapshot(step, {"x": step})
        rjc.wait()
    eventually(lambda: attempts.held_steps() == {3})
    assert rjc.restore(handle).state == {"x": 1}


def test_leases_end_with_their_attempt(attempts):
    attempts.begin()
    kept = [rjc.snapshot(step, {"x": step}, force=True) for step in (1, 2)]
    rjc.wait()
    attempts.begin()
    for step in (3, 4, 5):
        rjc.snapshot(step, {"x": step}, force=True)
        rjc.wait()
    assert rjc.latest() == 5
    assert len(kept) == 2


# --- a slow pipeline


class Slow:
    """Holds the pipeline of a session up until `go` is set."""

    def __init__(self, session):
        self.go, self.store = threading.Event(), session._pipeline._store_job
        session._pipeline._store_job = self

    def __call__(self, job):
        assert self.go.wait(60)
        return self.store(job)


def test_a_busy_pipeline_skips_and_then_waits_until_one_is_complete(attempts):
    slow = Slow(attempts.begin(on_busy="skip"))
    rjc.snapshot(1, {"x": 1})
    with pytest.warns(RuntimeWarning, match=r"step 2 skipped: rank 0 on node .* was still storing"):
        assert rjc.snapshot(2, {"x": 2}) is None
    # One was abandoned since the newest complete one, so the next is not skipped but waits.
    eventually(lambda: ray.get(attempts.coordinator.must_wait.remote(), timeout=30))
    threading.Timer(0.2, slow.go.set).start()
    assert rjc.snapshot(3, {"x": 3}).step == 3
    rjc.wait()
    assert rjc.latest() == 3


def test_a_busy_pipeline_is_waited_for_as_long_as_asked(attempts):
    slow = Slow(attempts.begin())
    rjc.snapshot(1, {"x": 1})
    with pytest.warns(RuntimeWarning, match=r"step 2 skipped.*after 0.1 s; raise SnapshotConfig.timeout_s"):
        assert rjc.snapshot(2, {"x": 2}, timeout_s=0.1) is None
    with pytest.raises(SnapshotTimeoutError, match=r"step 3.*still storing an earlier step"):
        rjc.snapshot(3, {"x": 3}, force=True, timeout_s=0.1)
    with pytest.raises(SnapshotTimeoutError, match=r"Step 1 was not stored within 0.1 s"):
        rjc.wait(timeout_s=0.1)
    threading.Timer(0.2, slow.go.set).start()
    assert rjc.snapshot(4, {"x": 4}).step == 4
    rjc.wait()
    assert rjc.latest() == 4


@pytest.mark.parametrize("strict", [False, True], ids=["warnings", "warnings are errors"])
def test_a_failed_snapshot_warns_and_training_goes_on(attempts, strict, caplog):
    session = attempts.begin()
    store = session._pipeline._store_job

    def fail(job):
        raise OSError("no room")

    session._pipeline._store_job = fail
    with warnings.catch_warnings(record=not strict) as caught:
        warnings.simplefilter("error" if strict else "always")
        handle = rjc.snapshot(1, {"x": 1})
        with pytest.raises(SnapshotError, match="The last snapshot failed: no room"):
            rjc.wait()
    text = caplog.text if strict else str([str(each.message) for each in caught])
    assert f"snapshot of step 1 failed on rank 0 on node {session.node_id}" in text
    with pytest.raises(SnapshotError, match="no room"):
        rjc.snapshot(1, {"x": 1}, force=True)
    with pytest.raises(SnapshotError, match="no room"):
        rjc.restore(handle)
    session._pipeline._store_job = store
    rjc.snapshot(2, {"x": 2})
    rjc.wait()
    assert rjc.latest() == 2


# --- a store that dies


@pytest.mark.parametrize("force", [False, True])
def test_a_dead_store_is_replaced_and_takes_the_next_snapshot(attempts, force):
    attempts.begin()
    rjc.snapshot(1, {"x": jnp.ones(1000)})
    rjc.wait()
    attempts.kill_store()
    handle = rjc.snapshot(2, {"x": jnp.full(1000, 2.0)}, force=force)
    rjc.wait()
    assert rjc.latest() == 2
    assert rjc.restore(handle).state["x"].tolist() == [2.0] * 1000


def test_a_store_that_dies_under_a_reserved_buffer_costs_nothing(attempts):
    session = attempts.begin()
    slow = Slow(session)
    handle = rjc.snapshot(1, {"x": jnp.ones(1000)}, force=True)
    attempts.kill_store()
    slow.go.set()
    rjc.wait()
    assert rjc.restore(handle).state["x"].tolist() == [1.0] * 1000
    # Kept by the new store, too.
    for step in (2, 3):
        rjc.snapshot(step, {"x": jnp.zeros(1000)})
        rjc.wait()
    eventually(lambda: attempts.held_steps() == {3})
    assert rjc.restore(handle).state["x"].tolist() == [1.0] * 1000


# --- restoring


def test_a_handle_can_be_restored_twice(attempts):
    attempts.begin()
    handle = rjc.snapshot(1, state_of(1))
    first, second = rjc.restore(handle, state_of(0)), rjc.restore(handle, state_of(0))
    jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, first.state)
    assert_state(second.state, 1)


def test_shardings_partial_and_cast_reach_the_restore(attempts):
    attempts.begin()
    handle = rjc.snapshot(1, state_of(1))
    template = {"b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    sharding = NamedSharding(MESH, P())
    with pytest.raises(TreeMismatchError, match=r"step 1 does not fit the template:\n\['b'\]"):
        rjc.restore(handle, template)
    restored = rjc.restore(handle, template, partial=True, cast=True, shardings=sharding).state
    assert restored["b"].sharding == sharding
    assert restored["b"].dtype == jnp.float32
    assert rjc.restore(handle).state["n"].tolist() == [1, 1, 1]


def test_what_is_no_snapshot_cannot_be_restored(attempts, tmp_path):
    attempts.begin()
    with pytest.raises(ConfigError, match="nothing to restore"):
        rjc.restore(None)
    for other in (str(tmp_path), tmp_path, f"file://{tmp_path}", ray.train.Checkpoint(str(tmp_path))):
        with pytest.raises(NoCheckpointError, match=f"no checkpoint at {tmp_path}"):
            rjc.restore(other)
    with pytest.raises(ConfigError, match=r"get_checkpoint\(\).*int"):
        rjc.restore(3)
    with pytest.raises(RestoreError, match="could not be decided"):
        rjc.restore(UndecidedCheckpoint())
    with pytest.raises(SnapshotLostError, match=r"Step 5 .*complete steps: "):
        rjc.restore(SnapshotCheckpoint(Generation(0, 0, 5)))


def test_waiting_for_a_snapshot_that_nobody_took_ends_in_time(attempts):
    attempts.begin()
    with pytest.raises(SnapshotTimeoutError, match=r"Step 8 was not complete within 0.1 s: no store has reported"):
        rjc.restore(SnapshotCheckpoint(Generation(1, 0, 8)), timeout_s=0.1)


# --- the manager


def run_context(path: Path, max_failures: int):
    storage = types.SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=str(path))
    failures = types.SimpleNamespace(max_failures=max_failures)
    return types.SimpleNamespace(run_config=types.SimpleNamespace(storage_context=storage, failure_config=failures))


def test_a_run_without_restarts_is_warned(cluster, tmp_path, recwarn):
    for max_failures in (0, 1, -1):
        manager = rjc.CheckpointManager()
        manager.after_controller_start(run_context(tmp_path / str(max_failures), max_failures))
        manager.after_controller_finish(types.SimpleNamespace(error=None))
    (warning,) = recwarn.list
    assert "max_failures=0" in str(warning.message)
    assert "no snapshot will be restored before the run is started again" in str(warning.message)


def test_a_finished_run_leaves_no_stores(attempts):
    attempts.begin()
    rjc.snapshot(1, {"x": 1})
    rjc.wait()
    pid = ray.get(attempts.store().pid.remote())
    ray.get(attempts.coordinator.finish.remote(keep=False), timeout=30)
    eventually(lambda: not fleet.living_stores(attempts.run) and not psutil.pid_exists(pid))


# --- states that must not be restored


def test_a_state_with_nan_is_never_restored_and_the_last_good_one_stays(attempts):
    attempts.begin(reject_nonfinite=True)
    rjc.snapshot(1, {"w": jnp.ones(4)})
    rjc.wait()
    # More of them than there are buffers.
    for step in (2, 3, 4, 5):
        rjc.snapshot(step, {"w": jnp.array([1.0, jnp.nan])}, force=step == 3)
        with pytest.raises(SnapshotError, match=r"NaN or infinity in \['w'\] on rank 0"):
            rjc.wait()
    assert rjc.latest() == 1
    assert attempts.begin().decision.located.generation.step == 1
    rjc.snapshot(6, {"w": jnp.ones(4)})
    rjc.wait()
    assert rjc.latest() == 6
