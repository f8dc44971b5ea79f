"""Pushes that several streams bring side by side."""

from __future__ import annotations

import threading
import time

import numpy as np
import pyarrow.flight as fl
import pytest
from flight_peer import DATA, NUM_BYTES, SECRET, Shelf, header_of
from hypothesis import example, given
from hypothesis import strategies as st

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import AuthenticationError, IntegrityError, SnapshotTimeoutError, StoreError
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.incoming import Incoming, Meeting
from ray_jax_ckpt.memory.outgoing import Outgoing, bands_of, within
from ray_jax_ckpt.memory.stream import Guard
from ray_jax_ckpt.memory.transfer import FlightServer, PartSpan, push
from ray_jax_ckpt.memory.wire import PushHeader


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("streams", [2, 3, 7])
def test_all_bands_arrive_in_their_places(server: FlightServer, shelf: Shelf, streams: int, verify: bool) -> None:
    header = header_of(DATA) if verify else header_of(DATA, digests=())
    assert len(bands_of(header, streams)) == streams
    chunks = [DATA[o : o + 1_234_567] for o in range(0, NUM_BYTES, 1_234_567)]
    result = push(server.address, SECRET, header, chunks, 20, streams=streams)
    assert (result.nbytes, result.verified) == (NUM_BYTES, verify)
    np.testing.assert_array_equal(shelf.buffer, DATA)
    assert shelf.ended == [True]
    assert shelf.begun == [header]


@pytest.mark.parametrize("at", [5, NUM_BYTES // 2, NUM_BYTES - 1])
def test_a_flipped_byte_in_any_band_fails_the_push(server: FlightServer, shelf: Shelf, at: int) -> None:
    damaged = DATA.copy()
    damaged[at] ^= 1
    with pytest.raises(IntegrityError, match="arrived with another digest"):
        push(server.address, SECRET, header_of(DATA), [damaged], 20, streams=4)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_too_few_bytes_fail_the_push(server: FlightServer, shelf: Shelf) -> None:
    with pytest.raises(StoreError, match=r"stream ended after|given up"):
        push(server.address, SECRET, header_of(DATA), [DATA[:-5]], 20, streams=4)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_a_band_that_never_comes_ends_with_the_deadline(
    server: FlightServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = Outgoing._join

    def join(self: Outgoing, number: int, pieces: object) -> int:
        if number == 2:
            time.sleep(30)
        return joins(self, number, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Outgoing, "_join", join)
    with pytest.raises(SnapshotTimeoutError, match="timeout_s=2"):
        push(server.address, SECRET, header_of(DATA), [DATA], 2, streams=4)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_a_stream_that_cannot_be_opened_fails_the_push_at_once(
    server: FlightServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(self: Outgoing, number: int, pieces: object) -> int:
        raise ConnectionError("no route")

    monkeypatch.setattr(Outgoing, "_join", join)
    with pytest.raises(StoreError, match="no route"):
        push(server.address, SECRET, header_of(DATA), [DATA], 60, streams=2)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_nobody_joins_what_is_not_under_way(server: FlightServer, shelf: Shelf) -> None:
    request = wire.JoinRequest(nonce="n" * 32, band=1)
    for secret, error, why in (
        (SECRET, fl.FlightServerError, "has never begun"),
        ("wrong", fl.FlightUnauthenticatedError, "missing or wrong"),
    ):
        token = wire.call_token(secret, server.address).encode()
        options = fl.FlightCallOptions(timeout=5, headers=[(b"authorization", token)])
        with fl.FlightClient(server.address) as client, pytest.raises(error, match=why):
            client.do_exchange(fl.FlightDescriptor.for_path(request.to_json()), options)[1].read_chunk()
    assert shelf.begun == []


def test_who_joins_does_not_send_to_an_impostor(server: FlightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, calls = wire.server_proof, []

    def forged(secret: str, address: str, nonce: str) -> str:
        # The second answer of this process is to the stream that joins.
        calls.append(nonce)
        return "forged" if len(calls) == 3 else proof(secret, address, nonce)

    monkeypatch.setattr(wire, "server_proof", forged)
    with pytest.raises((AuthenticationError, StoreError), match=r"does not know|given up"):
        push(server.address, SECRET, header_of(DATA), [DATA], 20, streams=2)


class _Stream:
    """Gives chunks as a Flight reader does, from a list of arrays."""

    def __init__(self, *arrays: np.ndarray, gate: threading.Event | None = None) -> None:
        self._arrays, self._gate = list(arrays), gate

    @property
    def schema(self):
        from ray_jax_ckpt.memory.stream import SCHEMA

        return SCHEMA

    def read_chunk(self):
        from types import SimpleNamespace

        from ray_jax_ckpt.memory.stream import to_batch

        if self._gate is not None:
            self._gate.wait(10)
        if not self._arrays:
            raise StopIteration
        return SimpleNamespace(data=to_batch(self._arrays.pop(0)), app_metadata=None)


def test_a_band_comes_once_and_only_while_the_push_is_under_way() -> None:
    data = DATA[:1000]
    header, target = header_of(data, digests=()), np.zeros(1000, np.uint8)
    incoming, meeting = Incoming(target, header, ((0, 400), (400, 600))), Meeting()
    with meeting.host("n", incoming):
        assert meeting.find("n") is incoming
        incoming.take(1, _Stream(data[400:]))
        for number in (1, 2):
            with pytest.raises(StoreError, match="is not awaited, or has come"):
                incoming.take(number, _Stream(data[400:]))
        with pytest.raises(StoreError, match="under way"), meeting.host("n", incoming):
            pass
    with pytest.raises(StoreError, match="over"):
        meeting.find("n")
    with pytest.raises(StoreError, match="is over"):
        incoming.take(0, _Stream(data[:400]))
    assert not target[:400].any()


def test_nothing_is_written_after_the_push_is_over() -> None:
    """The memory may have been given to another generation by then."""
    data, gate = DATA[:1000], threading.Event()
    target = np.zeros(1000, np.uint8)
    incoming = Incoming(target, header_of(data, digests=()), ((0, 400), (400, 600)))
    errors: list[BaseException] = []

    def late() -> None:
        try:
            incoming.take(1, _Stream(data[400:], gate=gate))
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    incoming.close()
    gate.set()
    thread.join(10)
    assert errors
    assert not target.any()


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 6), st.booleans())
@example([1, 0], 1, True)
def test_bands_cover_a_push_and_cut_no_digested_piece(sizes: list[int], streams: int, digested: bool) -> None:
    total, offset, digests = sum(sizes), 0, []
    for size in sizes:
        digests.append((offset, size, "d"))
        offset += size
    header = PushHeader(1, "1.0.5", "s", (PartSpan("w", 0, total),), total, "", tuple(digests) if digested else ())
    bands = bands_of(header, streams)
    assert 1 <= len(bands) <= streams
    request = wire.PushRequest(nonce="n", header=header, bands=bands)
    assert wire.PushRequest.from_json(request.to_json()) == request
    data = np.arange(total) % 251
    pieces = np.split(data.astype(np.uint8), np.cumsum(sizes)[:-1]) if sizes else []
    found = [piece for band in bands for piece in within(pieces, band)]
    assert np.concatenate([np.empty(0, np.uint8), *found]).tolist() == data.tolist()


@pytest.mark.parametrize(
    ("bands", "why"),
    [
        (((0, 50),), "bands of 50 bytes for 100"),
        (((0, 60), (50, 50)), "a band begins at 50, the one before ends at 60"),
        (((10, 90),), "a band begins at 10"),
        (((0, 55), (55, 45)), "within the piece at 50"),
        (((0, 2**62), (2**62, 1)), "malformed push request"),
        (((0, 0),) * 300, "malformed push request"),
    ],
)
def test_malformed_bands_are_refused(bands: tuple[tuple[int, int], ...], why: str) -> None:
    data = DATA[:100]
    header = header_of(data, digests=((0, 50, digest(data[:50])), (50, 50, digest(data[50:]))))
    with pytest.raises(StoreError, match=why):
        wire.PushRequest.from_json(wire.PushRequest(nonce="n", header=header, bands=bands).to_json())


def test_a_closed_guard_keeps_a_band_out() -> None:
    from ray_jax_ckpt.memory.stream import fill

    guard, target = Guard(), np.zeros(10, np.uint8)
    guard.close()
    with pytest.raises(StoreError, match="given up"):
        fill(target, header_of(DATA[:10]), _Stream(DATA[:10]), (0, 10), guard)
    assert not target.any()
