from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from flight_peer import DATA, NUM_BYTES, SECRET, Shelf, header_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import (
    AuthenticationError,
    IntegrityError,
    RestoreTimeoutError,
    SnapshotLostError,
    SnapshotTimeoutError,
    StaleAttemptError,
    StoreError,
)
from ray_jax_ckpt.memory import flight_server, wire
from ray_jax_ckpt.memory.stream import CHUNK_BYTES, Guard, pack
from ray_jax_ckpt.memory.transfer import FlightClients, FlightServer, PartSpan, fetch, push, split, streams_for

PEER = Path(__file__).with_name("flight_peer.py")
ROOT = PEER.parents[2]


@contextlib.contextmanager
def peer(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the peer in a process of its own, and gives it with the first line it says."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, PEER, *args], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


# What arrives is what was sent.


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
def test_fetch_from_another_process(verify: bool, streams: int) -> None:
    out = np.zeros(NUM_BYTES, np.uint8)
    cut = 12_345_678
    ranges = [
        ("1.0.5", "w", cut, NUM_BYTES - cut, out[cut:]),
        ("1.0.5", "empty", 0, 0, out[:0]),
        ("1.0.5", "w", 0, cut, out[:cut]),
    ]
    with peer("serve") as (_, address):
        fetch(address, SECRET, ranges, 20, verify=verify, streams=streams)
    np.testing.assert_array_equal(out, DATA)


def test_fetch_into_typed_arrays(server: FlightServer, shelf: Shelf) -> None:
    shelf.parts["f"] = np.arange(1000, dtype=np.float32).view(np.uint8)
    out = np.zeros((10, 100), np.float32)
    fetch(server.address, SECRET, [("1.0.5", "f", 0, 4000, out)], 20)
    np.testing.assert_array_equal(out.reshape(-1), np.arange(1000))


def test_nothing_to_fetch(server: FlightServer) -> None:
    fetch(server.address, SECRET, [], 20)
    fetch(server.address, SECRET, [("1.0.5", "empty", 0, 0, np.empty(0, np.uint8))], 20)


def test_many_tiny_ranges(server: FlightServer) -> None:
    out = np.zeros(5000 << 10, np.uint8)
    spots = [(i * 3001, i << 10) for i in range(5000)]
    ranges = [("1.0.5", "w", there, 1024, out[here : here + 1024]) for there, here in spots]
    begin = time.monotonic()
    fetch(server.address, SECRET, ranges, 20)
    assert time.monotonic() - begin < 5  # about 0.04 s on an idle core
    assert all(np.array_equal(out[here : here + 1024], DATA[there : there + 1024]) for there, here in spots)


def test_size_of_target_is_checked_before_anything_is_sent(shelf: Shelf, server: FlightServer) -> None:
    with pytest.raises(ValueError, match="10 bytes of part w of 1 do not fit an array of 9"):
        fetch(server.address, SECRET, [("1", "w", 0, 10, np.zeros(9, np.uint8))], 20)
    assert shelf.num_reads == 0


def test_push_from_another_process(server: FlightServer, shelf: Shelf) -> None:
    with peer("push", server.address) as (_, said):
        assert said == "verified"
    np.testing.assert_array_equal(shelf.buffer, DATA)
    assert shelf.ended == [True]
    assert shelf.begun == [header_of(DATA)]


@pytest.mark.parametrize("piece", [1, 999, 5000])
def test_push_of_small_digests_and_gaps(server: FlightServer, shelf: Shelf, piece: int) -> None:
    data = DATA[:5000]
    inner = tuple(d for d in header_of(data, step=100).digests if d[0] % 300)
    header = header_of(data, digests=(*inner[::-1], (300, 0, digest(b"")), (5000, 0, digest(b""))))
    chunks = [data[o : o + piece] for o in range(0, 5000, piece)]
    clients = FlightClients(SECRET)
    assert clients.push(server.address, header, chunks, timeout_s=20).verified
    np.testing.assert_array_equal(shelf.buffer[:5000], data)
    clients.close()


def test_push_of_nothing(server: FlightServer, shelf: Shelf) -> None:
    header = header_of(DATA[:0], parts=(PartSpan("a", 0, 0), PartSpan("b", 0, 0)), digests=((0, 0, digest(b"")),))
    result = push(server.address, SECRET, header, [DATA[:0]], 20)
    assert (result.nbytes, result.verified, shelf.ended) == (0, True, [True])


@given(
    sizes=st.lists(st.integers(0, 40), max_size=8),
    streams=st.integers(1, 5),
)
def test_split_covers_every_byte_once(sizes: list[int], streams: int) -> None:
    outs = [np.zeros(n, np.uint8) for n in sizes]
    shares = split([("g", str(i), 7, n, outs[i]) for i, n in enumerate(sizes)], streams)
    assert len(shares) <= streams
    for share in shares:
        for _, part, offset, nbytes, out in share:
            out += 1
            assert np.shares_memory(out, outs[int(part)][offset - 7 : offset - 7 + nbytes]) or nbytes == 0
    assert all((out == 1).all() for out in outs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1000, (1 << 20) - 1, 1 << 20, 9 << 20]), max_size=12))
def test_pack_keeps_bytes_and_bounds(sizes: list[int]) -> None:
    chunks = list(pack(DATA.data[:size] for size in sizes))
    assert all(chunk.nbytes <= CHUNK_BYTES for chunk in chunks)
    expected = [DATA[:size] for size in sizes]
    np.testing.assert_array_equal(np.concatenate([*chunks, DATA[:0]]), np.concatenate([*expected, DATA[:0]]))


def test_transfer_does_not_load_pandas() -> None:
    with peer("serve") as (_, address), peer("fetch", address) as (_, said):
        assert said == "pandas: False"


# Damage is found.


def test_flipped_byte_in_push(server: FlightServer, shelf: Shelf) -> None:
    damaged = DATA.copy()
    damaged[7_000_000] ^= 1
    with pytest.raises(IntegrityError, match=r"pushing 20971520 bytes .* 1048576 bytes at offset 6291456 arrived"):
        push(server.address, SECRET, header_of(DATA), [damaged], 20)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_flipped_byte_in_fetch(server: FlightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_server, "digest", lambda chunk: digest(chunk) if chunk[0] else "xxh3:0")
    zeros = np.flatnonzero(DATA[:10_000] == 0)
    ranges = [("1.0.5", "w", int(zeros[0]), 2 << 20, np.zeros(2 << 20, np.uint8))]
    with pytest.raises(IntegrityError, match="another digest"):
        fetch(server.address, SECRET, ranges, 20)


@pytest.mark.parametrize(("sent", "match"), [(99, "sent 99 bytes"), (101, "sent 101 bytes|more bytes came")])
def test_push_of_another_size_than_announced(server: FlightServer, shelf: Shelf, sent: int, match: str) -> None:
    with pytest.raises(StoreError, match=match):
        push(server.address, SECRET, header_of(DATA[:100]), [DATA[:sent]], 20)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


def test_failing_source_of_chunks_is_the_callers_error(server: FlightServer, shelf: Shelf) -> None:
    def chunks() -> Iterator[np.ndarray]:
        yield DATA[:1000]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        push(server.address, SECRET, header_of(DATA), chunks(), 20)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


# Refusals arrive as what they are.


def test_lost_part(server: FlightServer) -> None:
    with pytest.raises(
        SnapshotLostError, match=rf"first x .*, store {re.escape(server.address)}, after .* no part x here$"
    ):
        fetch(server.address, SECRET, [("1", "x", 0, 1, np.zeros(1, np.uint8))], 20)


def test_range_beyond_part(server: FlightServer) -> None:
    with pytest.raises(StoreError, match="part w of 1 has no 10 bytes at offset 20971515"):
        fetch(server.address, SECRET, [("1", "w", NUM_BYTES - 5, 10, np.zeros(10, np.uint8))], 20)


def test_refused_push(server: FlightServer, shelf: Shelf) -> None:
    with pytest.raises(StaleAttemptError, match="attempt 0 is over"):
        push(server.address, SECRET, header_of(DATA, attempt=0), [DATA], 20)
    assert shelf.ended == []


def test_refusal_at_the_end(server: FlightServer, shelf: Shelf) -> None:
    shelf.error = RuntimeError("no room in the books")
    with pytest.raises(StoreError, match="RuntimeError: no room in the books"):
        push(server.address, SECRET, header_of(DATA), [DATA], 20)
    assert shelf.ended == [True]


def test_too_small_buffer_is_released(server: FlightServer, shelf: Shelf) -> None:
    shelf.buffer = shelf.buffer[:10]
    with pytest.raises(StoreError, match="too small"):
        push(server.address, SECRET, header_of(DATA), [DATA], 20)
    assert shelf.over.wait(10)
    assert shelf.ended == [False]


@given(st.text())
def test_errors_survive_the_wire(text: str) -> None:
    kind, said = wire.error_from_text(f"noise: {wire.error_to_text(SnapshotLostError(text))}. Detail: Failed")
    assert kind is SnapshotLostError
    assert said == text[:2000].replace("</", "<")


def test_unknown_errors_become_store_errors() -> None:
    for text in ("", "<rjc os>x</rjc>", "<rjc Enum>x</rjc>"):
        assert wire.error_from_text(text) == (StoreError, text)


# Peers that die or stall.


def test_killed_receiver_and_nobody_there() -> None:
    clients = FlightClients(SECRET)
    with peer("serve", "die") as (process, address):
        begin = time.monotonic()
        with pytest.raises(StoreError, match=f"store {re.escape(address)}"):
            clients.fetch(address, [("1", "w", 0, NUM_BYTES, np.zeros(NUM_BYTES, np.uint8))], timeout_s=30)
        assert process.wait(10) == -signal.SIGKILL
        with pytest.raises(StoreError, match="onnect"):
            clients.push(address, header_of(DATA), [DATA], timeout_s=30)
        assert time.monotonic() - begin < 10


def test_stopped_store_is_a_timeout() -> None:
    clients = FlightClients(SECRET)
    with peer("serve") as (process, address):
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RestoreTimeoutError, match=r"after 1\.\d s: no end within timeout_s=1: raise"):
            clients.fetch(address, [("1", "w", 0, 9, np.zeros(9, np.uint8))], timeout_s=1)
        with pytest.raises(SnapshotTimeoutError, match=r"pushing .* after 1\.\d s"):
            clients.push(address, header_of(DATA), [DATA], timeout_s=1)
        # More than the network takes from a process that is stopped.
        ranges = [("1" * 100, "w", i, 1, np.zeros(1, np.uint8)) for i in range(60_000)]
        with pytest.raises(RestoreTimeoutError, match="60000 ranges"):
            clients.fetch(address, ranges, timeout_s=1)
        assert time.monotonic() - begin < 12


def test_nothing_is_written_after_a_failure(server: FlightServer, shelf: Shelf) -> None:
    """One stream fails, and another one's bytes come later: the caller may have reused the memory."""
    entered, go_on = threading.Event(), threading.Event()
    read = shelf.read

    def slow(generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        if offset:
            entered.set()
            go_on.wait(10)
        elif not entered.wait(10) or part == "w":
            raise SnapshotLostError("gone")
        return read(generation, part, offset, nbytes)

    shelf.read = slow  # type: ignore[method-assign]
    out = np.zeros(1000, np.uint8)
    with pytest.raises(SnapshotLostError, match="gone"):
        fetch(server.address, SECRET, [("1", "w", 0, 1000, out)], 20, streams=2)
    go_on.set()
    time.sleep(0.3)
    assert not out.any()


def test_closed_guard() -> None:
    guard = Guard()
    with guard:
        pass
    guard.close()
    with pytest.raises(StoreError, match="given up"), guard:
        pass


@pytest.mark.parametrize("direction", ["serve", "receive"])
def test_store_stopped_in_the_middle_is_a_timeout(direction: str) -> None:
    big = np.zeros(256 << 20, np.uint8)
    with peer(direction, "stop") as (process, address):
        begin = time.monotonic()
        if direction == "serve":
            with pytest.raises(RestoreTimeoutError, match=r"fetching .* timeout_s=2"):
                fetch(address, SECRET, [("1", "w", 0, NUM_BYTES, big[:NUM_BYTES])], 2)
        else:
            with pytest.raises(SnapshotTimeoutError, match=r"pushing .* timeout_s=2"):
                push(address, SECRET, header_of(big, digests=()), [big], 2)
        assert time.monotonic() - begin < 8
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("fate", ["die", "stop"])
def test_sender_that_dies_or_stalls_in_mid_push_frees_the_buffer(server: FlightServer, shelf: Shelf, fate: str) -> None:
    with peer("push", server.address, fate):
        assert shelf.over.wait(15)
    assert shelf.ended == [False]
    assert push(server.address, SECRET, header_of(DATA), [DATA], 20).verified


def test_closing_does_not_wait_for_a_stalled_peer(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_server, "_CLOSE_S", 0.5)
    server = FlightServer(SECRET, shelf, "127.0.0.1")
    with peer("push", server.address, "stop") as (_, said):
        assert said == "sending"
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 3
    assert shelf.over.wait(15)


# Who lacks the secret.


def test_wrong_secret_reads_and_writes_nothing(
    server: FlightServer, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    out = np.zeros(10, np.uint8)
    for secret in ("", "wrong", SECRET + "x", "s\N{SNOWMAN}"):
        with pytest.raises(AuthenticationError, match="does not accept this run's secret"):
            fetch(server.address, secret, [("1", "w", 0, 10, out)], 20)
        with pytest.raises(AuthenticationError, match="does not accept this run's secret"):
            push(server.address, secret, header_of(DATA), [DATA], 20)
    assert (shelf.num_reads, shelf.begun, out.any()) == (0, [], np.False_)
    assert {record.getMessage() for record in caplog.records} == {
        "Refused a connection from ipv4:127.0.0.1: it does not know the run's secret.",
        "Refused a connection from an address that a stream does not tell: it does not know the run's secret.",
    }
    assert len(caplog.records) == 2


def test_secret_never_travels_and_its_token_fits_one_store_only() -> None:
    tokens = {wire.call_token(SECRET, f"grpc+tcp://10.0.0.{i}:1") for i in range(3)}
    assert len(tokens) == 3
    assert all(SECRET not in token for token in tokens)


@pytest.mark.parametrize("token", [None, "nonsense", "right"])
def test_every_other_call_is_refused(server: FlightServer, shelf: Shelf, token: str | None) -> None:
    right = wire.call_token(SECRET, server.address)
    sent = right if token == "right" else token
    options = fl.FlightCallOptions(timeout=5, headers=[] if sent is None else [(b"authorization", sent.encode())])
    descriptor, action = fl.FlightDescriptor.for_command(b"x"), fl.Action("shutdown", b"")
    refused = pa.ArrowNotImplementedError if token == "right" else (fl.FlightUnauthenticatedError, pa.ArrowException)
    why = "DoGet and DoExchange only" if token == "right" else "secret is missing or wrong"
    with fl.FlightClient(server.address) as client:
        for call in (
            lambda: list(client.list_flights(options=options)),
            lambda: list(client.list_actions(options)),
            lambda: list(client.do_action(action, options)),
            lambda: client.get_flight_info(descriptor, options),
            lambda: client.get_schema(descriptor, options),
            lambda: client.do_put(descriptor, pa.schema([]), options)[0].close(),
        ):
            with pytest.raises(refused, match=why):
                call()
    assert (shelf.num_reads, shelf.begun) == (0, [])


def test_two_tokens_are_none(server: FlightServer) -> None:
    right = wire.call_token(SECRET, server.address).encode()
    options = fl.FlightCallOptions(timeout=5, headers=[(b"authorization", right)] * 2)
    ticket = wire.FetchTicket(nonce="n", ranges=())
    with fl.FlightClient(server.address) as client, pytest.raises(fl.FlightUnauthenticatedError):
        client.do_get(fl.Ticket(ticket.to_json()), options).read_chunk()


def test_impostor_gets_nothing_and_is_not_believed(
    server: FlightServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took over a dead store's port lets everybody in, but knows no secret."""
    monkeypatch.setattr(flight_server._Server, "_admit", lambda self, context: None)
    monkeypatch.setattr(flight_server, "_STREAMS", ())
    taken: list[int] = []

    def chunks() -> Iterator[np.ndarray]:
        taken.append(1)
        yield DATA

    out = np.zeros(10, np.uint8)
    with pytest.raises(AuthenticationError, match="does not know"):
        push(server.address, "other secret", header_of(DATA), chunks(), 20)
    with pytest.raises(AuthenticationError, match="does not know"):
        fetch(server.address, "other secret", [("1", "w", 0, 10, out)], 20)
    assert (taken, out.any()) == ([], np.False_)


# Malformed input.


@given(st.binary(max_size=200))
def test_random_tickets_are_malformed(data: bytes) -> None:
    with pytest.raises(StoreError, match="malformed"):
        wire.FetchTicket.from_json(data)
    with pytest.raises(StoreError, match="malformed"):
        wire.PushRequest.from_json(data)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {"nonce": _values, "ranges": _values | st.lists(st.lists(_values, max_size=5))},
        optional={"verify": _values, "extra": _values},
    )
)
def test_whatever_parses_is_in_bounds(message: dict[str, object]) -> None:
    try:
        ticket = wire.FetchTicket.from_json(json.dumps(message).encode())
    except StoreError as error:
        if "malformed ticket" not in str(error):
            raise
        return
    assert "extra" not in message
    for _, _, offset, nbytes in ticket.ranges:
        assert 0 <= offset < 2**62
        assert 0 <= nbytes < 2**62


@given(st.lists(st.tuples(st.text(), st.text(), st.integers(0, 2**62 - 1), st.integers(0, 2**62 - 1))), st.booleans())
def test_tickets_survive_the_wire(ranges: list[tuple[str, str, int, int]], verify: bool) -> None:
    ticket = wire.FetchTicket(nonce="abc", ranges=tuple(ranges), verify=verify)
    assert wire.FetchTicket.from_json(ticket.to_json()) == ticket


@pytest.mark.parametrize(
    "changes",
    [
        {"total_bytes": -1},
        {"total_bytes": 2**62},
        {"total_bytes": 99},
        {"attempt": "1"},
        {"generation": "x" * 2000},
        {"parts": (PartSpan("a", 0, 50), PartSpan("b", 49, 10))},
        {"parts": (PartSpan("a", -1, 5),)},
        {"parts": (PartSpan("a", 2**61, 2**61),)},
        {"digests": ((0, 50, "x"), (10, 10, "y"))},
        {"digests": ((90, 11, "x"),)},
        {"meta": 5},
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_malformed_headers_touch_nothing(server: FlightServer, shelf: Shelf, changes: dict[str, object]) -> None:
    with pytest.raises(StoreError, match="malformed push"):
        push(server.address, SECRET, header_of(DATA[:100], **changes), [DATA[:100]], 20)
    assert (shelf.begun, shelf.ended) == ([], [])


def test_malformed_ticket_and_stream_of_another_type_touch_nothing(server: FlightServer, shelf: Shelf) -> None:
    token = wire.call_token(SECRET, server.address).encode()
    options = fl.FlightCallOptions(timeout=5, headers=[(b"authorization", token)])
    with fl.FlightClient(server.address) as client:
        with pytest.raises(fl.FlightServerError, match="malformed ticket"):
            client.do_get(fl.Ticket(b'{"nonce": 1, "ranges": []}'), options).read_chunk()
        assert (shelf.num_reads, shelf.begun) == (0, [])
        request = wire.PushRequest(nonce="n", header=header_of(DATA[:16], digests=()))
        schema = pa.schema([("bytes", pa.int64())])
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(request.to_json()), options)
        with contextlib.suppress(pa.ArrowException):
            writer.begin(schema)
            writer.write_batch(pa.record_batch([pa.array([1, 2])], schema=schema))
            reader.read_chunk()
        with pytest.raises(fl.FlightServerError, match="does not consist of bytes"):
            reader.read_chunk()
        with contextlib.suppress(pa.ArrowException):
            writer.close()
    assert shelf.ended == [False]


def test_only_large_transfers_get_several_streams() -> None:
    assert [streams_for(n << 20, 4) for n in (0, 1, 127, 128, 255, 256, 10_000)] == [1, 1, 1, 2, 3, 4, 4]
    assert streams_for(1 << 40, 1) == 1
