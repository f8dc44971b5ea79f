"""Per-process data: captured at the call, put back, resharded; no cluster needed."""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import grain
import numpy as np
import pytest
from grain.experimental import ElasticIterator
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from ray_jax_ckpt.data_state import DataCapture, DataRoom, decode_states, put_back, reshard, write_blobs
from ray_jax_ckpt.digest import copy_and_digest
from ray_jax_ckpt.errors import DataStateError, SnapshotLostError
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.scratch import make_scratch, sweep_scratch

ROOMY = 2**28


def kept(data: Any, *, rank: int = 0, world_size: int = 1, room: DataRoom | None = None) -> tuple[bytes, np.ndarray]:
    """Captures, finishes and stores data as a pipeline does: an index, and the buffer with what is beside it."""
    return stored(DataCapture(data, ROOMY), rank=rank, world_size=world_size, room=room)


def stored(
    capture: DataCapture, *, rank: int = 0, world_size: int = 1, room: DataRoom | None = None
) -> tuple[bytes, np.ndarray]:
    capture.finish()
    own = (0, ((0, 5),), 5)
    base = Layout(rank, world_size, "", ({"path": "x"},), frozenset({0}), lay_out([(f"h{rank}", (), True, [own])]))
    layout, offsets = (room or DataRoom()).place(base, capture.blobs)
    buffer = np.full(layout.num_bytes, 0xA5, np.uint8)
    blobs = write_blobs(buffer, layout, capture.blobs, offsets, lambda a, b: copy_and_digest(a, b, True))
    index = Index(Generation(1, 0, 7), layout, {f"h{rank}": ["d"]}, {}, capture.encoded, {}, blobs)
    return index.to_bytes(), buffer


def states_of(*ranks: tuple[bytes, np.ndarray]) -> dict[int, Any]:
    """What is read back from what `kept` returned for each rank."""
    buffers = {f"h{rank}": buffer for rank, (_, buffer) in enumerate(ranks)}

    def fetch(wants, dtypes):
        items = [(want.candidates[0].part, want.candidates[0].item) for want in wants]
        return [buffers[part][item.offset : item.offset + item.num_bytes] for part, item in items]

    return decode_states([Index.from_bytes(raw) for raw, _ in ranks], fetch)


def through(data: Any) -> Any:
    return states_of(kept(data))[0]


class Batches:
    """A position, and a large order that is part of the state."""

    def __init__(self, position=0, order=None):
        self.position, self.order = position, np.arange(10_000) if order is None else order

    def get_state(self):
        return {"position": self.position, "order": self.order}

    def set_state(self, state):
        self.position, self.order = state["position"], state["order"]


class Shared(Batches):
    """One that divides its work anew."""

    def reshard_state(self, states, *, rank, world_size):
        total = sum(state["position"] for state in states.values())
        return {"position": total // world_size, "order": states[0]["order"] + rank}


class Files:
    """Orbax's protocol: the state is in the files, written in the background."""

    def __init__(self, number=0, padding=0):
        self.number, self.padding, self.wrong = number, padding, None

    async def save(self, directory):
        number = self.number

        async def write():
            path = await directory.await_creation()
            await asyncio.sleep(0)
            (path / "deep").mkdir()
            (path / "deep" / "number.txt").write_text(str(number))
            (path / "padding").write_bytes(b"x" * self.padding)
            if self.wrong:
                raise self.wrong

        return write()

    async def load(self, directory):
        async def read():
            self.number = int((directory / "deep" / "number.txt").read_text())

        return read()


@pytest.fixture(autouse=True)
def no_directory_stays():
    yield
    assert glob.glob(f"{tempfile.gettempdir()}/rjc-data-{os.getpid()}-*") == []


# --- what is kept


@pytest.mark.parametrize(
    "data",
    [
        None,
        0,
        {"position": 3, "epoch": (1, None), "seed": 2**70, "nan": [float("inf")]},
        {"$": "tagged", "bytes": b"\0\xff" * 4000, "short": b"s"},
        (np.arange(3), np.arange(100_000, dtype=">i4"), np.float32(2), np.zeros((0, 3)), np.bytes_(b"x\0" * 5000)),
        ["text" * 10_000, {1: "a"}],
        np.random.RandomState(5).get_state(),
        np.random.default_rng(5).bit_generator.state,
    ],
    ids=["none", "zero", "plain", "bytes", "numpy", "long", "random_state", "generator"],
)
def test_plain_values_come_back_with_their_types(data):
    found = through(data)
    np.testing.assert_equal(found, data)
    assert jsonable_types(found) == jsonable_types(data)


def jsonable_types(x):
    if isinstance(x, dict):
        return {key: jsonable_types(value) for key, value in x.items()}
    return (type(x), [jsonable_types(y) for y in x]) if isinstance(x, list | tuple) else type(x)


def test_large_contents_stay_out_of_the_index():
    data = {"buffer": np.random.default_rng(0).bytes(2**20), "order": np.arange(2**17), "names": ["name"] * 10_000}
    raw, buffer = kept(data)
    assert len(raw) < 2_000
    assert len(buffer) > 2**21
    np.testing.assert_equal(states_of((raw, buffer))[0], data)


def test_what_comes_back_is_a_copy():
    raw, buffer = kept({"bytes": b"b" * 5000, "order": np.arange(5000)})
    found = states_of((raw, buffer))[0]
    buffer[:] = 0
    assert found["bytes"] == b"b" * 5000
    found["order"] += 1
    assert found["order"].tolist() == list(range(1, 5001))


def test_data_is_the_one_of_the_call():
    batches, plain, files = Batches(5), {"list": [1], "array": np.arange(5000)}, Files(8)
    capture = DataCapture([batches, plain, files], ROOMY)
    batches.position, batches.order[:] = 6, -1
    plain["list"].append(2)
    plain["array"][:] = -1
    files.number = 9
    found = states_of(stored(capture))[0]
    assert (found[0]["position"], found[1]["list"]) == (5, [1])
    assert found[0]["order"].tolist() == list(range(10_000))
    assert found[1]["array"].tolist() == list(range(5000))
    assert found[2] == {"deep/number.txt": b"8", "padding": b""}


def test_the_layout_stays_the_same_while_the_size_varies():
    room = DataRoom()
    layouts = [Index.from_bytes(kept(b"b" * size, room=room)[0]).layout for size in (100_000, 99_000, 4096, 100_100, 5)]
    assert len({layout.num_bytes for layout in layouts}) == 1
    assert layouts[0].num_bytes < 115_000
    assert Index.from_bytes(kept(b"b" * 200_000, room=room)[0]).layout.num_bytes > 200_000


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=5))
def test_room_holds_what_it_is_made_for(sizes):
    room, base = DataRoom(), Layout(0, 1, "", (), frozenset(), lay_out([("h0", (), True, [(0, ((0, 5),), 5)])]))
    for size in sizes:
        layout, (offset,) = room.place(base, [b"x" * size])
        assert offset % 64 == 0
        assert offset >= 5
        assert offset + size <= layout.num_bytes <= 64 + max(sizes) * 1.13 + 128


def test_data_that_no_store_holds_is_named():
    raw, _ = kept({"order": np.arange(5000)})

    def fetch(wants, dtypes):
        raise KeyError(0)

    with pytest.raises(SnapshotLostError, match=r"Step 7: no living store holds all data= of rank 0"):
        decode_states([Index.from_bytes(raw)], fetch)


# --- putting back


def test_an_object_gets_its_state():
    batches = Batches()
    put_back(batches, through(Batches(5, np.arange(3))))
    assert (batches.position, batches.order.tolist()) == (5, [0, 1, 2])


def test_every_object_in_a_tree_gets_its_own():
    def tree(*numbers):
        a, b, c = numbers
        return {"train": [Batches(a), Files(b)], "eval": (Batches(c), "note"), "epoch": 3}

    target = tree(0, 0, 0)
    put_back(target, through(tree(1, 2, 3)))
    found = target["train"][0].position, target["train"][1].number, target["eval"][0].position
    assert found == (1, 2, 3)


@pytest.mark.parametrize(
    ("data", "saved", "message"),
    [
        (lambda x: {"a": x}, [1], r"data= is a dict with keys \[\"'a'\"\].*snapshot has a list of 1"),
        (lambda x: {"a": [x, x]}, {"a": [{"position": 1, "order": None}]}, r"at \['a'\] is a list of 2.* list of 1"),
        (lambda x: {"a": x}, {"b": 1}, "keys .*'a'.*keys .*'b'"),
        (lambda x: [x, Files()], [{"position": 1, "order": None}, 3], r"at \[1\] loads files.*has an int"),
        (lambda x: {"a": 1}, {"a": 1}, r"type dict has no set_state.*Restored\.data"),
        (lambda x: x, None, "holds no data= of this rank"),
    ],
    ids=["container", "length", "keys", "files", "nothing", "none"],
)
def test_data_that_does_not_fit_changes_nothing(data, saved, message):
    batches = Batches(4)
    with pytest.raises(DataStateError, match=message):
        put_back(data(batches), saved)
    assert batches.position == 4


# --- files


def test_files_travel_as_bytes():
    assert isinstance(Files(), ocp.handlers.StatefulCheckpointable)
    saved = through(Files(41, padding=10_000))
    assert saved == {"deep/number.txt": b"41", "padding": b"x" * 10_000}
    files = Files()
    put_back(files, saved)
    assert files.number == 41


def test_files_work_where_an_event_loop_runs():
    async def main():
        capture = DataCapture(Files(6), ROOMY)
        return await asyncio.to_thread(states_of, stored(capture))

    assert asyncio.run(main())[0]["deep/number.txt"] == b"6"


def test_files_that_are_too_large_are_refused():
    capture = DataCapture({"it": Files(1, padding=2000)}, 1000)
    with pytest.raises(DataStateError, match=r"at \['it'\] of type Files saved 2001 bytes.*max_data_bytes allows 1000"):
        capture.finish()
    with pytest.raises(DataStateError, match=r"it has 5000 bytes.*max_data_bytes allows 1000"):
        DataCapture(b"x" * 5000, 1000)
    with pytest.raises(DataStateError, match=r"max_data_bytes allows 1000"):
        DataCapture("x" * 5000, 1000).finish()


def test_a_save_that_fails_is_named():
    files = Files()
    files.wrong = OSError("disk full")
    with pytest.raises(DataStateError, match=r"type Files could not be saved: OSError\('disk full'\)"):
        DataCapture(files, ROOMY).finish()
    DataCapture(Files(), ROOMY).discard()  # leaves no directory, and no coroutine that was never awaited


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "", "nul\0"])
def test_file_names_cannot_lead_out(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DataStateError, match="leads out of its directory"):
        put_back(Files(), {name: b"x"})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, tempfile; tempfile.tempdir = os.environ['WHERE']\n"
        "from ray_jax_ckpt.scratch import make_scratch\n"
        "(make_scratch() / 'file').write_text('x'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"WHERE": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    mine = make_scratch()
    assert list(tmp_path.iterdir()) == [mine]
    sweep_scratch()
    assert list(tmp_path.iterdir()) == [mine]


# --- grain


def grain_iterator(kind, rank=0, world_size=1, batch=8):
    source = grain.MapDataset.source(np.arange(1000)).shuffle(seed=3)
    if kind == "elastic":
        return ElasticIterator(source, batch, grain.sharding.ShardOptions(rank, world_size))
    if kind == "dataset":
        return iter(source[rank::world_size].batch(batch // world_size).to_iter_dataset())
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 1000, 1),
        sampler=grain.samplers.IndexSampler(1000, grain.sharding.ShardOptions(rank, world_size), True, 1, 3),
        operations=[grain.transforms.Batch(batch // world_size)],
    )
    return iter(loader)


@pytest.mark.parametrize("kind", ["dataset", "loader", "elastic"])
def test_a_grain_iterator_goes_on_where_it_was(kind):
    iterator = grain_iterator(kind)
    for _ in range(5):
        next(iterator)
    saved = through({"train": iterator})
    wanted = [np.asarray(next(iterator)).tolist() for _ in range(3)]
    fresh = grain_iterator(kind)
    put_back({"train": fresh}, saved)
    assert [np.asarray(next(fresh)).tolist() for _ in range(3)] == wanted


def test_a_grain_iterator_that_only_has_files_does_too():
    class OnlyFiles:
        def __init__(self, iterator):
            self.save, self.load = iterator.save, iterator.load

    iterator, fresh = grain_iterator("dataset"), grain_iterator("dataset")
    next(iterator)
    saved = through(OnlyFiles(iterator))
    assert list(saved) == ["process_0-of-1.json"]
    put_back(OnlyFiles(fresh), saved)
    assert next(fresh).tolist() == next(iterator).tolist()


def the_same(states, *, rank, world_size):
    """All ranks have come equally far, and read disjoint parts of one order."""
    assert all(state == states[0] for state in states.values())
    return states[0]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 1)])
def test_a_grain_order_goes_on_in_a_group_of_another_size(sizes):
    before, after = sizes
    old = [grain_iterator("elastic", rank, before) for rank in range(before)]
    seen = [np.concatenate([next(iterator) for _ in range(5)]) for iterator in old]
    states = states_of(*(kept(iterator, rank=rank, world_size=before) for rank, iterator in enumerate(old)))
    new = [grain_iterator("elastic", rank, after) for rank in range(after)]
    for rank, iterator in enumerate(new):
        put_back(iterator, reshard(iterator, states, rank, after, the_same))
    seen += [np.concatenate([next(iterator) for _ in range(5)]) for iterator in new]
    alone = grain_iterator("elastic")
    assert sorted(np.concatenate(seen)) == sorted(np.concatenate([next(alone) for _ in range(10)]))


# --- another number of processes


def saved_by(*data):
    return states_of(*(kept(each, rank=rank, world_size=len(data)) for rank, each in enumerate(data)))


def test_an_object_without_a_rule_is_refused_in_another_group():
    states = saved_by(Batches(1), Batches(2))
    batches = Batches(7)
    with pytest.raises(
        DataStateError,
        match=r"saved by 2 processes and cannot be handed to 3: Batches has no reshard_state.*data_by_rank",
    ):
        reshard(batches, states, 0, 3, None)
    assert batches.position == 7


def test_an_object_reshards_its_states_on_every_rank():
    states = saved_by(Shared(1, np.arange(2)), Shared(5, np.arange(2)))
    for rank in range(3):
        batches = Shared()
        put_back(batches, reshard(batches, states, rank, 3, None))
        assert (batches.position, batches.order.tolist()) == (2, [rank, rank + 1])


def test_objects_in_a_tree_reshard_each_their_own():
    states = saved_by(*({"a": [Shared(n, np.arange(1))], "b": (Shared(10 * n), "note")} for n in (1, 5)))
    target = {"a": [Shared()], "b": (Shared(), "")}
    made = reshard(target, states, 0, 3, None)
    put_back(target, made)
    assert (target["a"][0].position, target["b"][0].position, made["b"][1]) == (2, 20, "note")


def test_plain_values_beside_an_object_have_to_be_equal():
    states = saved_by({"it": Shared(1), "seed": 3}, {"it": Shared(2), "seed": 4})
    with pytest.raises(DataStateError, match=r"at \['seed'\] was saved by 2 processes.*reshard_data=function"):
        reshard({"it": Shared(), "seed": 0}, states, 0, 1, None)


def test_a_function_reshards_everything_at_once():
    calls = []

    def function(states, rank, world_size):
        calls.append((dict(states), rank, world_size))
        return sum(states.values()) + rank

    states = saved_by(3, 4, None)
    assert [reshard(None, states, rank, 2, function) for rank in range(2)] == [7, 8]
    # Ranks that gave nothing are not there.
    assert calls == [({0: 3, 1: 4}, rank, 2) for rank in range(2)]
    assert reshard(None, {0: None, 1: None}, 0, 3, function) is None


# --- what cannot be kept


def test_other_objects_are_refused_with_their_path():
    with pytest.raises(
        DataStateError, match=r"the value at \['a'\]\[0\] is a builtins\.object.*get_state\(\) and set_"
    ):
        DataCapture({"a": [object()]}, ROOMY)
    with pytest.raises(DataStateError, match=r"generator, an iterator that does not tell its position"):
        DataCapture((x for x in range(3)), ROOMY)

    class Odd:
        def get_state(self):
            return {"inner": object()}

    with pytest.raises(DataStateError, match=r"data= of type Odd cannot be saved: the value at \['inner'\]"):
        DataCapture(Odd(), ROOMY)


def test_saved_data_is_json_and_damage_is_named():
    raw, buffer = kept({"order": np.arange(5000)})
    tree = json.loads(raw)
    tree["contents"]["data"] = {"json": 7}
    with pytest.raises(DataStateError, match="damaged"):
        states_of((json.dumps(tree).encode(), buffer))
    tree["contents"]["data"] = {"value": {"$": "bytes", "v": -1}}
    with pytest.raises(DataStateError, match="damaged"):
        states_of((json.dumps(tree).encode(), buffer))


@pytest.mark.parametrize("forged", [3, "text", {}, {"other": 1}, {"json": 7}, {"json": {}}, [1]])
def test_data_that_nobody_wrote_is_damaged(forged):
    raw, _ = kept({"order": 1})
    index = dataclasses.replace(Index.from_bytes(raw), data=forged, blobs=())
    with pytest.raises(DataStateError, match="damaged"):
        decode_states([index], lambda wants, dtypes: [])
