"""Attacks on a store's port, for a test or for longer: `python tests/memory/fuzz_flight.py --seconds 200`.

A store's serving half runs in a process of its own. Attackers of every kind below, with and without the run's secret,
work on it in turns and at once, while a real peer goes on pushing and fetching. What must not change: what is held, the
memory and the threads of the store, and that the peer is served.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.content import Content, push_message
from ray_jax_ckpt.memory.intake import Intake
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.memory.stream import SCHEMA, to_batch
from ray_jax_ckpt.memory.transfer import FlightClients, FlightServer, PushHeader
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.pushes import PushJob
from ray_jax_ckpt.model.shards import Generation

SECRET = "the run's secret"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NUM_BYTES = 4 << 20
DATA = np.frombuffer(np.random.default_rng(0).bytes(NUM_BYTES), np.uint8)
ROOT = Path(__file__).parents[2]


def message(step: int) -> tuple[PushHeader, list[memoryview]]:
    """A push as a peer's store sends it."""
    generation = Generation(1, 0, step)
    parts = lay_out([("s0>1", (1,), True, [(0, ((0, NUM_BYTES),), NUM_BYTES)]), ("h0", (1,), True, [])])
    layout = Layout(0, 1, "structure", ({"path": "w"},), frozenset(), parts)
    index = Index(generation, layout, {"s0>1": [digest(DATA)], "h0": []})
    content = Content.own(index.to_bytes(), verify=True)
    return push_message(PushJob(generation, (), 1, ""), "peer", [(content, DATA, "s0>1"), (content, DATA, "h0")])


# The store.


class Store:
    """What a store does for its port, and an account of how it is."""

    def __init__(self) -> None:
        self.shelf = Shelf("store", per_source=2, attempt=1)
        self.intake = Intake(self.shelf, timeout_s=1)
        self.held = 0

    def read(self, generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        segment, start, size = self.shelf.find(Generation.parse(generation), part)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError("out of range")
        return segment.view().data[start + offset : start + offset + nbytes]

    def begin_receive(self, header: PushHeader) -> np.ndarray:
        return self.intake.begin(header, verify=True)

    def end_receive(self, header: PushHeader, ok: bool) -> None:
        if self.intake.end(header, ok=ok):
            generation = Generation.parse(header.generation)
            older = {one for one in self.shelf.slots.generations() if one < generation}
            self.shelf.release(older)
            self.held += 1

    def account(self) -> dict[str, Any]:
        process = psutil.Process()
        generations = self.shelf.slots.generations()
        return {
            "rss": process.memory_info().rss,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "taken": self.held,
            "buffers": self.shelf.num_bytes,
            "filling": sum(slot.phase is slots_.Phase.FILLING for slot in self.shelf.slots.used.values()),
            "steps": sorted(one.step for one in generations),
            "sources": sorted({slot.source for slot in self.shelf.slots.used.values()}),
            "damaged": sorted(part for one in generations for part in self.shelf.verify(one)),
        }


def serve() -> None:
    """The store's process: prints its address, then an account for every line that it reads."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    store = Store()
    server = FlightServer(SECRET, store, "127.0.0.1")
    print(server.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps(store.account()), flush=True)


# The attackers.


@dataclass
class Target:
    """Where the store is, and what the attacker knows."""

    address: str
    random: random.Random
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition("://")[2].rpartition(":")
        return host, int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.port, timeout=2)

    def options(self, token: str | None) -> fl.FlightCallOptions:
        headers = [] if token is None else [(wire.AUTH_HEADER.encode(), token.encode(errors="replace"))]
        return fl.FlightCallOptions(timeout=2, headers=headers)

    @property
    def known(self) -> fl.FlightCallOptions:
        return self.options(wire.call_token(SECRET, self.address))

    def bytes(self, most: int) -> bytes:
        return self.random.randbytes(self.random.randrange(most))


def random_bytes(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(target.bytes(5000))
        if target.random.random() < 0.5:
            connection.settimeout(0.2)
            connection.recv(100)


def random_frames(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(PREFACE)
        for _ in range(target.random.randrange(20)):
            body = target.bytes(200)
            kind, flags, stream = (target.random.randrange(n) for n in (12, 256, 6))
            length = len(body) if target.random.random() < 0.8 else target.random.randrange(1 << 24)
            connection.sendall(struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + body)


def wrong_token(target: Target) -> None:
    token = target.random.choice([None, "", "x" * 500, wire.call_token("other", target.address), target.address])
    options, descriptor = target.options(token), fl.FlightDescriptor.for_command(target.bytes(50))
    with fl.FlightClient(target.address) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.do_get(fl.Ticket(target.bytes(5000)), options).read_chunk(),
            lambda: list(client.list_flights(options=options)),
            lambda: list(client.do_action(fl.Action("shutdown", b""), options)),
            lambda: client.get_flight_info(descriptor, options),
            lambda: client.do_put(descriptor, SCHEMA, options)[0].close(),
            lambda: client.do_exchange(descriptor, options)[1].read_chunk(),
        ]
        target.random.choice(calls)()


def large_ticket(target: Target) -> None:
    with fl.FlightClient(target.address) as client:
        client.do_get(fl.Ticket(b"x" * (16 << 20)), target.options(None)).read_chunk()


def nonsense(target: Target, depth: int = 0) -> Any:
    """Some JSON value, with a taste for what might hurt."""
    pick = target.random.randrange(10 if depth < 3 else 8)
    odd = [-1, 2**62, 2**63 - 1, 2**64, 10**30, "1.0.1", "../../etc/passwd", "\x00", "s0>1", "w" * 2000, "1" * 400]
    if pick < 8:
        return target.random.choice([None, True, 0, 1.5, float(2**70), target.random.randrange(-9, 9), "", *odd])
    some = [nonsense(target, depth + 1) for _ in range(target.random.randrange(4))]
    return some if pick == 8 else {str(key): value for key, value in enumerate(some)}


def hostile_ticket(target: Target) -> None:
    ranges = [[nonsense(target) for _ in range(target.random.randrange(3, 6))] for _ in range(3)]
    if target.random.random() < 0.5:
        ranges = [["1.0.1", "s0>1", target.random.randrange(2**62), target.random.randrange(2**62)]]
    ticket = {"nonce": "n", "ranges": ranges, "verify": True}
    if target.random.random() < 0.3:
        ticket[target.random.choice(["nonce", "ranges", "verify", "more"])] = nonsense(target)
    with fl.FlightClient(target.address) as client:
        reader = client.do_get(fl.Ticket(json.dumps(ticket).encode()), target.known)
        while True:
            reader.read_chunk()


def hostile_header(target: Target) -> None:
    header, _ = message(target.random.randrange(1 << 40))
    request = json.loads(wire.PushRequest("n", header).to_json())
    where = target.random.choice([request, request["header"], *request["header"]["parts"]])
    if target.random.random() < 0.3:
        request["header"]["total_bytes"] = request["header"]["parts"][0]["nbytes"] = 1 << 45
    else:
        where[target.random.choice(list(where))] = nonsense(target)
    exchange(target, fl.FlightDescriptor.for_command(json.dumps(request).encode()), num_batches=1)


def truncated_push(target: Target) -> None:
    header, _ = message(target.random.randrange(1 << 30, 1 << 40))
    header = PushHeader(**{**vars(header), "source": f"intruder {target.random.randrange(3)}"})
    request = wire.PushRequest("n", header, target.random.choice([(), ((0, 1 << 20), (1 << 20, 1 << 20))]))
    exchange(target, fl.FlightDescriptor.for_command(request.to_json()), num_batches=target.random.randrange(3))


def uninvited(target: Target) -> None:
    """Joins a push of somebody else, or none."""
    request: dict[str, Any] = {"nonce": target.random.choice(["n", "m"]), "band": target.random.randrange(3)}
    if target.random.random() < 0.5:
        request[target.random.choice([*request, "more"])] = nonsense(target)
    text = target.bytes(500).hex().encode() if target.random.random() < 0.2 else json.dumps(request).encode()
    exchange(target, fl.FlightDescriptor.for_path(text), num_batches=1)


def exchange(target: Target, descriptor: fl.FlightDescriptor, num_batches: int) -> None:
    with fl.FlightClient(target.address) as client:
        writer, reader = client.do_exchange(descriptor, target.known)
        try:
            writer.begin(SCHEMA)
            for _ in range(num_batches):
                writer.write_batch(to_batch(DATA[: target.random.randrange(1, 1 << 20)]))
            if target.random.random() < 0.5:
                writer.done_writing()
                reader.read_chunk()
                reader.read_chunk()
        finally:
            reader.cancel()
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()


def many_connections(target: Target) -> None:
    opened = []
    try:
        for _ in range(100):
            opened.append(target.connect())
    finally:
        for connection in opened:
            connection.close()


def idle_connection(target: Target) -> None:
    """Says nothing, or stops after the first words, or in the middle of a call, and stays."""
    connection = target.connect()
    headers = b"\x83\x87" + b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in [
            (b":path", b"/arrow.flight.protocol.FlightService/DoExchange"),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
    )
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    call = struct.pack(">I", len(headers))[1:] + b"\x01\x04" + struct.pack(">I", 1) + headers
    said = target.random.choice([b"", PREFACE, PREFACE + settings, PREFACE + settings + call])
    connection.sendall(said)
    target.sockets.append(connection)
    if len(target.sockets) > 100:
        target.sockets.pop(0).close()


ATTACKS: list[Callable[[Target], None]] = [
    random_bytes,
    random_frames,
    wrong_token,
    large_ticket,
    hostile_ticket,
    hostile_header,
    truncated_push,
    uninvited,
    many_connections,
    idle_connection,
]


# The siege.


@dataclass
class Report:
    """What came of it.

    Attributes:
        before: The store's account of itself before the attacks.
        after: And after them.
        attacks: How often each was made.
        served: Step of the last push of the real peer, and how often it was served.
        failures: What went wrong for the peer.
        log: What the store logged.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    attacks: Counter[str]
    served: int
    failures: list[str]
    log: list[str]


@contextlib.contextmanager
def store_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store, and its address."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def account(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The store's account of itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def besiege(seconds: float, *, num_attackers: int = 4, seed: int = 0) -> Report:
    """Attacks a store for so long; a real peer pushes and fetches meanwhile."""
    with store_process() as (process, address):
        log: list[str] = []
        assert process.stderr is not None
        stderr = process.stderr
        threading.Thread(target=lambda: log.extend(line.rstrip() for line in stderr), daemon=True).start()
        clients, failures = FlightClients(SECRET), []
        served = _serve_peer(clients, address, 1, failures)
        attacks: Counter[str] = Counter()
        # Once each before the first account: what is made for good at the first call is no growth.
        _attack(Target(address, random.Random(seed)), time.monotonic() + 3, attacks, in_turn=True)
        before, end = account(process), time.monotonic() + seconds
        threads = [
            threading.Thread(target=_attack, args=(Target(address, random.Random(seed + n)), end, attacks))
            for n in range(1, num_attackers + 1)
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            served = _serve_peer(clients, address, served + 1, failures)
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        time.sleep(2.5)  # calls that were left open end by their deadline
        served = _serve_peer(clients, address, served + 1, failures)
        return Report(before, account(process), attacks, served, failures, log)


def _attack(target: Target, end: float, attacks: Counter[str], *, in_turn: bool = False) -> None:
    for number in range(10**9):
        if time.monotonic() >= end or (in_turn and number >= 3 * len(ATTACKS)):
            break
        attack = ATTACKS[number % len(ATTACKS)] if in_turn else target.random.choice(ATTACKS)
        with contextlib.suppress(pa.ArrowException, OSError, StopIteration):
            attack(target)
        attacks[attack.__name__] += 1
    for connection in target.sockets:
        connection.close()


def _serve_peer(clients: FlightClients, address: str, step: int, failures: list[str]) -> int:
    """A push and a fetch as the run's own stores and workers make them."""
    header, buffers = message(step)
    try:
        clients.push(address, header, buffers, timeout_s=20)
        out = np.empty(NUM_BYTES, np.uint8)
        clients.fetch(address, [(header.generation, "s0>1", 0, NUM_BYTES, out)], timeout_s=20)
        if not np.array_equal(out, DATA):
            failures.append("other bytes came")
    except Exception as error:
        failures.append(repr(error))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    report = besiege(arguments.seconds, seed=arguments.seed)
    for name, value in vars(report).items():
        print(f"{name}: {dict(value) if isinstance(value, Counter) else value}")


if __name__ == "__main__":
    main()
