"""Reading a generation from real Flight servers and mapped memory, holders that die or stop among them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from flight_peer import DATA, NUM_BYTES, SECRET, Shelf

from ray_jax_ckpt.memory import transfer
from ray_jax_ckpt.memory.arena import Arena
from ray_jax_ckpt.memory.flight_server import FlightServer
from ray_jax_ckpt.memory.messages import Located, Place, StoreView
from ray_jax_ckpt.memory.reader import Reader
from ray_jax_ckpt.model.catalog import Catalog
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.recovery import NotHeldError, Want
from ray_jax_ckpt.model.shards import Generation

PEER = Path(__file__).with_name("flight_peer.py")
G = Generation(1, 0, 5)
BYTES = np.dtype(np.uint8)


def wants(*boxes: tuple[int, int]) -> list[Want]:
    """Of a leaf of `NUM_BYTES` elements that is all in part "w"."""
    parts = lay_out([("w", (), True, [(0, ((0, NUM_BYTES),), NUM_BYTES)])])
    index = Index(G, Layout(0, 1, "", ({"path": "w"},), frozenset(), parts), {"w": [""]})
    return [Want((box,), Catalog.of([index]).shared(0), 1) for box in boxes]


def located(*stores: StoreView) -> Located:
    return Located(G, 1, (), {"w": tuple(store.name for store in stores)}, {store.name: store for store in stores})


def read(where: Located, *, timeout_s: float = 20.0, said: list[str] | None = None) -> tuple[np.ndarray, Reader]:
    """All of the leaf, as seen from "here"."""

    def suspect(holder: str, text: str) -> None:
        if said is not None:
            said.append(holder)

    with Reader(where, "here", SECRET, verify=True, timeout_s=timeout_s, streams=2, suspect=suspect) as reader:
        return np.array(reader.fetch(wants((0, NUM_BYTES)), [BYTES])[0]), reader


@pytest.fixture
def served() -> Iterator[tuple[Shelf, StoreView]]:
    """A store on another node."""
    shelf = Shelf()
    server = FlightServer(SECRET, shelf, "127.0.0.1")
    yield shelf, StoreView("good", "there", server.address)
    server.close()


@contextlib.contextmanager
def doomed(fate: str) -> Iterator[StoreView]:
    """A store on another node that ends or stops when its bytes are asked for."""
    command = [sys.executable, str(PEER), "serve", fate]
    environment = {**os.environ, "PYTHONPATH": str(PEER.parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield StoreView("doomed", "elsewhere", process.stdout.readline().strip())
        finally:
            process.kill()


def test_all_holders_serve_at_the_same_time(served):
    shelf, good = served
    twin = FlightServer(SECRET, Shelf(), "127.0.0.1")
    with (
        mock.patch("ray_jax_ckpt.model.recovery._BAND_BYTES", 1 << 20),
        mock.patch.object(transfer, "_STREAM_BYTES", 1),
    ):
        array, reader = read(located(good, StoreView("twin", "there", twin.address)))
    twin.close()
    np.testing.assert_array_equal(array, DATA)
    assert reader.used_peers
    assert reader.fetched == {"good": NUM_BYTES // 2, "twin": NUM_BYTES // 2}
    assert shelf.num_reads >= 2


@pytest.mark.parametrize("fate", ["die", "stop"])
def test_what_a_dead_or_stopped_holder_owed_comes_from_the_other(served, fate):
    _, good = served
    with doomed(fate) as bad, mock.patch("ray_jax_ckpt.model.recovery._BAND_BYTES", 1 << 20):
        said: list[str] = []
        array, reader = read(located(bad, good), timeout_s=6.0, said=said)
    np.testing.assert_array_equal(array, DATA)
    assert said == ["doomed"]
    assert reader.fetched["good"] == NUM_BYTES


def test_memory_of_this_node_is_mapped_and_no_byte_travels(served):
    shelf, good = served
    arena = Arena()
    segment = arena.allocate(NUM_BYTES + 64)
    segment.view()[64 : 64 + NUM_BYTES] = DATA
    own = StoreView("own", "here", "nowhere", {"w": Place(segment.handle(), 64, NUM_BYTES)})
    array, reader = read(located(good, own))
    np.testing.assert_array_equal(array, DATA)
    assert not reader.used_peers
    assert shelf.num_reads == 0
    # A store that let go of it, or died: the other one has it too.
    handle = segment.handle()
    arena.close()
    own = StoreView("own", "here", "nowhere", {"w": Place(handle, 64, NUM_BYTES)})
    said: list[str] = []
    array, reader = read(located(good, own), said=said)
    np.testing.assert_array_equal(array, DATA)
    assert reader.used_peers
    assert said == ["own"]


def test_overlapping_boxes_are_fetched_once(served):
    _, good = served
    boxes = [(0, 3 << 20), (1 << 20, 2 << 20), (1 << 20, 5 << 20), (0, 3 << 20)]
    with Reader(located(good), "here", SECRET, verify=True, timeout_s=20) as reader:
        found = reader.fetch(wants(*boxes), [BYTES] * len(boxes))
        for array, (start, stop) in zip(found, boxes, strict=True):
            np.testing.assert_array_equal(array, DATA[start:stop])
        assert reader.fetched == {"good": 5 << 20}


def test_without_a_holder_left_it_is_said_what_each_said(served):
    _, good = served
    nobody = StoreView("nobody", "there", "grpc+tcp://127.0.0.1:1")
    where = Located(G, 1, (), {"w": ("nobody",)}, {"nobody": nobody, "good": good})
    with pytest.raises(NotHeldError) as caught:
        read(where)
    assert caught.value.parts == ("w",)
    assert "127.0.0.1:1" in caught.value.said["nobody"]
    with pytest.raises(NotHeldError, match="0"), doomed("stop") as stopped:
        read(located(stopped), timeout_s=1.0)


def test_who_lacks_the_secret_of_a_store_is_not_served(served):
    _, good = served
    with (
        pytest.raises(NotHeldError) as caught,
        Reader(located(good), "here", "another", verify=True, timeout_s=5) as reader,
    ):
        reader.fetch(wants((0, 10)), [BYTES])
    assert "secret" in caught.value.said["good"]
