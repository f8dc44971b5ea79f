"""Verified reads: bytes reach their places in any shape, and none that differ from the digest pass."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pyarrow.fs as pafs
import pytest
from filesystems import ObjectStore
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import IntegrityError, NoCheckpointError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.model.shards import extent, volume, within
from ray_jax_ckpt.storage import segments, streams
from ray_jax_ckpt.storage.segments import Segment, Share, check, flat_boxes, read, read_bytes
from ray_jax_ckpt.storage.streams import Deadline, Job, run

KEY = "bucket/file"
BLOCK = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(segments, "PIECE_BYTES", 32)
    monkeypatch.setattr(streams, "_FIRST_PAUSE_S", 0.001)


def stored(content: bytes, block: int = BLOCK) -> tuple[ObjectStore, Segment]:
    store = ObjectStore()
    store.objects[KEY] = content
    blocks = tuple(digest(content[at : at + block]) for at in range(0, max(len(content), 1), block))
    return store, Segment(KEY, 0, len(content), blocks, block)


def on(store: ObjectStore) -> pafs.FileSystem:
    return pafs.PyFileSystem(store)


def soon() -> Deadline:
    return Deadline.after(20)


sides = st.tuples(st.integers(0, 3), st.integers(1, 5)).map(lambda x: (x[0], x[0] + x[1]))
boxes = st.lists(sides, max_size=3).map(tuple)


@st.composite
def nested(draw):
    """A stored box, and boxes that overlap it."""
    outer = draw(boxes)
    wanted = [
        tuple(
            sorted(draw(st.tuples(st.integers(a, b), st.integers(a, b)).filter(lambda x: x[0] != x[1])))
            for a, b in outer
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return outer, wanted


@given(boxes, st.data())
def test_a_run_of_elements_is_boxes_in_order(box, data):
    size = volume(box)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(extent(box))
    found = [numbers[within(one, box)].reshape(-1) for one in flat_boxes(start, stop, box)]
    assert list(itertools.chain.from_iterable(found)) == list(range(start, stop))


@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.dtype("S5")])
@given(nested())
def test_every_wanted_box_gets_its_bytes(dtype, case):
    box, wanted = case
    array = np.arange(volume(box)).astype(dtype).reshape(extent(box))
    store, segment = stored(array.tobytes())
    targets = [np.empty(extent(want), dtype) for want in wanted]
    read(on(store), segment, [Share(t, want, box, want) for t, want in zip(targets, wanted, strict=True)], soon())
    for target, want in zip(targets, wanted, strict=True):
        np.testing.assert_array_equal(target, array[within(want, box)])


def test_only_blocks_with_needed_bytes_are_read():
    array = np.arange(64, dtype=np.float64).reshape(8, 8)  # a row is a block
    store, segment = stored(array.tobytes())
    target, rows = np.empty((2, 3)), ((3, 5), (1, 4))
    read(on(store), segment, [Share(target, rows, ((0, 8), (0, 8)), rows)], soon())
    np.testing.assert_array_equal(target, array[3:5, 1:4])
    assert sum(size for _, _, size in store.read) == 2 * BLOCK


@pytest.mark.parametrize("at", [0, 100, 511])
@pytest.mark.parametrize("columns", [8, 3])
def test_a_flipped_bit_in_what_is_read_is_an_error_that_names_file_and_bytes(at, columns):
    store, segment = stored(np.arange(64, dtype=np.float64).tobytes())
    raw = bytearray(store.objects[KEY])
    raw[at] ^= 4
    store.objects[KEY] = bytes(raw)
    box, want = ((0, 8), (0, 8)), ((0, 8), (0, columns))
    with pytest.raises(IntegrityError, match=rf"bucket/file .*damaged: bytes {at // BLOCK * BLOCK} to"):
        read(on(store), segment, [Share(np.empty((8, columns)), want, box, want)], soon())
    with pytest.raises(IntegrityError, match="damaged"):
        check(on(store), segment, soon())


def test_a_file_that_is_too_short_or_gone_is_an_error():
    store, segment = stored(bytes(200))
    store.objects[KEY] = bytes(150)
    with pytest.raises(IntegrityError, match="ends 10 bytes too early"):
        read_bytes(on(store), segment, soon())
    store.objects.clear()
    with pytest.raises(NoCheckpointError, match="bucket/file"):
        read_bytes(on(store), segment, soon())


def test_an_empty_file_is_read_and_has_a_digest():
    store, segment = stored(b"")
    assert read_bytes(on(store), segment, soon()) == b""
    with pytest.raises(IntegrityError):
        read_bytes(on(store), Segment(KEY, 0, 0, ("xxh3:0",), 1), soon())


def test_a_read_that_fails_now_and_then_is_made_again():
    store, segment = stored(bytes(range(200)))
    failures = iter([OSError("throttled"), None, OSError("cut"), OSError("cut")])

    def fail(key: str, start: int) -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    store.before_read = fail
    assert read_bytes(on(store), segment, soon()) == bytes(range(200))


@pytest.mark.parametrize(
    ("text", "words", "tries"),
    [
        ("AWS Error SLOW_DOWN during GetObject", "SLOW_DOWN", streams.ATTEMPTS),
        ("AWS Error ACCESS_DENIED during GetObject", "credentials do not allow it.*ACCESS_DENIED", 1),
    ],
)
def test_storage_that_goes_on_failing_is_an_error_with_its_words(text, words, tries):
    store, segment = stored(bytes(10))
    calls = []

    def fail(key: str, start: int) -> None:
        calls.append(start)
        raise OSError(text)

    store.before_read = fail
    with pytest.raises(StorageError, match=f"Reading bucket/file .*{words}"):
        read_bytes(on(store), segment, soon())
    assert len(calls) == tries


def test_storage_that_hangs_ends_in_a_timeout_that_names_the_file():
    store, segment = stored(bytes(10))
    go_on = threading.Event()
    store.before_read = lambda key, start: go_on.wait(30) and None
    deadline = Deadline.after(0.3)
    try:
        with pytest.raises(RestoreTimeoutError, match=r"Reading it .*0.3 s.*timeout_s"):
            run([Job("Reading it", lambda: read_bytes(on(store), segment, deadline))], streams=2, deadline=deadline)
    finally:
        go_on.set()


def test_the_first_failure_ends_all():
    begun, deadline = [], Deadline.after(20)

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise IntegrityError("one")
        deadline.stopped.wait(0.01)

    with pytest.raises(IntegrityError, match="one"):
        run([Job(str(n), lambda n=n: work(n)) for n in range(1, 1000)], streams=2, deadline=deadline)
    assert deadline.stopped.is_set()
    assert len(begun) < 999
