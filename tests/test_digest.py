from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jax_ckpt.digest import CHUNK_BYTES, Digester, copy_and_digest, digest


def test_is_tagged_xxh3() -> None:
    assert digest(b"abc") == f"xxh3:{xxhash.xxh3_64_hexdigest(b'abc')}"
    assert digest(b"") == "xxh3:2d06800538d394c2"


@pytest.mark.parametrize("nbytes", [0, 1, 64 << 10, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_copy_and_digest(nbytes: int) -> None:
    source = np.arange(nbytes, dtype=np.uint8)
    for verify in (True, False):
        target = np.full(nbytes, 255, np.uint8)
        assert copy_and_digest(target, source, verify) == (digest(source) if verify else "")
        np.testing.assert_array_equal(target, source)


@settings(deadline=None)
@given(st.binary(max_size=2000), st.data())
def test_any_flipped_bit_shows(data: bytes, draw: st.DataObject) -> None:
    assert digest(data) == digest(memoryview(data)) == digest(np.frombuffer(data, np.uint8))
    if data:
        bit = draw.draw(st.integers(0, 8 * len(data) - 1))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert digest(flipped) != digest(data)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50)))
def test_pieces_make_the_whole(pieces: list[bytes]) -> None:
    digester = Digester()
    for piece in pieces:
        digester.update(np.frombuffer(piece, np.uint8))
    assert digester.result() == digest(b"".join(pieces))


def test_bytes_of_any_dtype_and_shape() -> None:
    array = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    target = np.zeros_like(array)
    assert copy_and_digest(target, array, True) == digest(array.tobytes())
    np.testing.assert_array_equal(target, array)
    assert digest(np.array(1.5)) == digest(np.array([1.5]))


def test_wrong_sizes_and_strides() -> None:
    array = np.zeros((4, 4), np.uint8)
    with pytest.raises(ValueError, match="copy 16 bytes into a buffer of 15 bytes"):
        copy_and_digest(np.zeros(15, np.uint8), array, True)
    with pytest.raises(ValueError, match=r"not C-contiguous: an array of shape \(4, 4\)"):
        digest(array.T[:, :])
    with pytest.raises(ValueError, match="not C-contiguous: a buffer"):
        digest(memoryview(b"abcd")[::2])


def test_other_threads_run_meanwhile() -> None:
    """A digest or copy that held the GIL would stall heartbeats and the training thread."""
    big = np.zeros(128 << 20, np.uint8)
    target = np.ones_like(big)
    ticks, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    digest(big)
    copy_and_digest(target, big, True)
    copy_and_digest(target, big, False)
    took = time.monotonic() - begin
    over.set()
    thread.join()
    assert len([t for t in ticks if t >= begin]) > 5, f"{len(ticks)} ticks in {took:.3f} s"
