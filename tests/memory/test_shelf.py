"""The second buffer of a source is made in advance: in the background, never one too many, never in anybody's way."""

from __future__ import annotations

import threading
import time

import pytest

from ray_jax_ckpt.memory import arena, shelf
from ray_jax_ckpt.memory.content import Content
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.shards import Generation

SIZE = 64 * 4096


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """What these tests allocate counts as large."""
    monkeypatch.setattr(shelf, "PREPARE_BYTES", SIZE)


def filled(store, step, source="own", attempt=1, num_bytes=SIZE):
    """A generation that is held, of which the source prepares the next."""
    slot = store.await_slot(attempt, Generation(attempt, 0, step), source, "", 1.0)
    store.allocate(slot, num_bytes, source)
    store.commit(slot, attempt, Content([], [], {}, {}))
    store.prepare(source)
    return Generation(attempt, 0, step)


@pytest.mark.parametrize("odd", [0, 1, 4095], ids=["pages", "odd", "nearly"])
def test_the_second_buffer_is_there_before_it_is_asked_for(odd):
    store = Shelf("own", per_source=2, attempt=1)
    size = SIZE + 4096 if odd else SIZE
    filled(store, 1, num_bytes=SIZE + odd)
    until(lambda: store.num_bytes == 2 * size)
    filled(store, 2, num_bytes=SIZE + odd)
    filled(store, 1, source="peer", num_bytes=2 * SIZE)
    until(lambda: store.num_bytes == 2 * size + 4 * SIZE)


def test_a_buffer_that_is_needed_while_it_is_made_is_waited_for_and_not_made_twice(monkeypatch):
    monkeypatch.setattr(arena, "_POPULATE_BYTES", 4096)
    begun = threading.Event()
    paced = Shelf._pace

    def pace(self, seconds):
        begun.set()
        while not self._hurrying:
            time.sleep(0.001)
        paced(self, seconds)

    monkeypatch.setattr(Shelf, "_pace", pace)
    store = Shelf("own", per_source=2, attempt=1)
    filled(store, 1)
    assert begun.wait(10)
    filled(store, 2)
    assert store.num_bytes == 2 * SIZE


def test_generations_of_earlier_attempts_keep_it_from_being_made():
    store = Shelf("own", per_source=2, attempt=1)
    filled(store, 1, num_bytes=SIZE - 4096)
    store.update(lambda slots: slots_.fence(slots, 2))
    before = set(threading.enumerate())
    filled(store, 2, attempt=2, num_bytes=2 * SIZE)
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("buffer for")]
    assert store.num_bytes == 3 * SIZE - 4096


def test_what_is_made_stays_within_two_buffers_per_source(monkeypatch):
    store = Shelf("own", per_source=2, attempt=1)
    monkeypatch.setattr(shelf, "PREPARE_BYTES", 2 * SIZE)
    filled(store, 1)
    filled(store, 2)
    assert store.num_bytes == 2 * SIZE
    monkeypatch.setattr(shelf, "PREPARE_BYTES", SIZE)
    store.prepare("own")
    store._prepare("own")
    assert store.num_bytes == 2 * SIZE


def test_a_node_without_memory_for_it_is_no_error(monkeypatch, caplog):
    caplog.set_level("INFO")
    store = Shelf("own", per_source=2, attempt=1)
    monkeypatch.setattr(shelf, "PREPARE_BYTES", 2 * SIZE)
    filled(store, 1)
    monkeypatch.setattr(arena, "available_bytes", lambda: 4096)
    store._prepare("own")
    assert "No second buffer" in caplog.text
    assert store.num_bytes == SIZE
