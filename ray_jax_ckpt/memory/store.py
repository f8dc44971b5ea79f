"""The actor that holds snapshots of one worker and of its peers, and outlives the training processes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from ray.actor import ActorHandle

from ray_jax_ckpt.errors import IntegrityError, SnapshotLostError, StoreError
from ray_jax_ckpt.memory.content import Content, push_message
from ray_jax_ckpt.memory.intake import Intake
from ray_jax_ckpt.memory.messages import Grant, Group, Inventory, Probe, RankIndex, StoreSettings, StoreView
from ray_jax_ckpt.memory.pusher import Pusher
from ray_jax_ckpt.memory.scrub import Scrub
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.memory.tls import load_tls
from ray_jax_ckpt.memory.transfer import FlightClients, FlightServer, PushHeader, streams_for
from ray_jax_ckpt.memory.uploads import Destination, Pace, Uploads
from ray_jax_ckpt.model import pushes
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.books import Held, Statement
from ray_jax_ckpt.model.index import Index
from ray_jax_ckpt.model.pushes import PushJob
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease
from ray_jax_ckpt.observe import faults
from ray_jax_ckpt.scratch import sweep_scratch
from ray_jax_ckpt.storage.manifest import FileRecord
from ray_jax_ckpt.storage.plan import DirectoryPlan
from ray_jax_ckpt.system import process_alive, process_start_time

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
# Two heartbeats and a half.
SILENCE_S = 5.0
# Each takes a core, or most of one, at both ends, while training goes on, and some 100 MB of transport buffers.
PUSH_STREAMS = max(1, (os.cpu_count() or 1) // 4)
# In the name of a source that pushes one generation, not one after the other.
_AGAIN = " again "


@dataclass(frozen=True)
class StoreOptions:
    """How a store is set up.

    Attributes:
        name: Its identity: run, node and index on that node.
        node_id: Ray's id of its node.
        node_ip: Where its Flight server listens.
        domain: Its failure domain.
        slots: Buffers that each source may use.
        attempt: It refuses what is of attempts before this one.
        orphan_timeout_s: It ends itself so long after the last heartbeat.
        timeout_s: Bound of its own waits.
        settings: How it works until a group comes with others.
    """

    name: str
    node_id: str
    node_ip: str
    domain: str
    slots: int
    attempt: int
    orphan_timeout_s: float
    timeout_s: float
    settings: StoreSettings = field(default_factory=StoreSettings)


class ReplicaStore:
    """Snapshot memory of one worker, run as a detached actor (`num_cpus=0`, several calls at once, no jax).

    Life: created by the coordinator on a worker's node; found by name and taken over by later attempts and by new
    drivers of the same run; ends itself when heartbeats stop for `orphan_timeout_s`, and at once when its raylet is
    gone (a store of a dead node must not go on answering). Methods may be called at any time and from any thread.
    """

    def __init__(self, options: StoreOptions, secret: str) -> None:
        self._options, self._secret = options, secret
        limits = {"per_source": options.slots, "max_bytes": options.settings.max_bytes}
        self._shelf = Shelf(options.name, attempt=options.attempt, **limits)
        self._incarnation = uuid.uuid4().hex
        self._pushes = itertools.count()
        self._uploads = Uploads(self._shelf)
        self._intake = Intake(self._shelf, timeout_s=options.timeout_s)
        self._settings = options.settings
        self._coordinator: ActorHandle | None = None
        self._group: Group | None = None
        self._last_heartbeat = self._last_word = time.monotonic()
        self._pusher = Pusher(self._send)
        tls = load_tls(options.settings.tls, options.node_ip) if options.settings.tls else None
        self._clients = FlightClients(secret, tls)
        self._server = FlightServer(secret, self, options.node_ip, tls)
        self._raylet = os.getppid()
        self._dead_writers: set[str] = set()
        self._scrub = Scrub(self._shelf, self._tell)
        self._scrub.every(options.settings.scrub_interval_s)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # Who it is.

    def inventory(self, coordinator: ActorHandle | None = None, attempt: int = 0, driver: str = "") -> Inventory:
        """Who this store is and what it holds.

        Args:
            coordinator: Whom it reports to from now on, without a gap: whatever is not in the answer is reported. One
                of an older attempt than the newest one is only answered.
            attempt: Writes of attempts before this one are refused from now on.
            driver: Whose attempt it is: uploads of others are refused too.
        """
        self._last_heartbeat = time.monotonic()
        with self._shelf.changed:
            # What a zombie asks takes no reports away from the driver that has replaced it.
            if coordinator is not None and attempt >= self._shelf.slots.attempt:
                self._coordinator = coordinator
            self._shelf.update(lambda slots: slots_.fence(slots, attempt, driver))
            statement = self._shelf.statement(self._incarnation)
            options, attempt = self._options, self._shelf.slots.attempt
        address = self._server.address
        return Inventory(
            options.name, options.node_id, options.domain, address, attempt, self._secret, statement, self._group
        )

    def heartbeat(self) -> Statement:
        """The run's controller is alive.

        Returns what is held: a report, or a release, may have been lost on its way.
        """
        self._last_heartbeat = time.monotonic()
        return self._shelf.statement(self._incarnation)

    def held_bytes(self) -> int:
        """Memory of all buffers, free ones included."""
        return self._shelf.num_bytes

    def pid(self) -> int:
        """Process id of this store."""
        return os.getpid()

    def probe(self) -> Probe:
        """Who it is, for somebody who looks on; no sign of life of its run."""
        slots = self._shelf.slots
        buffers, leases = tuple(slots.used.values()), tuple(slots.leases.values())
        return Probe(os.getpid(), self._rank(), self._coordinator, buffers, leases)

    def join_group(self, group: Group) -> None:
        """Whom to push to in the group's attempt. Raises StaleAttemptError if a newer one has started."""
        with self._shelf.changed:
            slots_.check_attempt(self._shelf.slots, group.attempt)
            moved = self._group is None or self._group.addresses != group.addresses
            self._group, self._settings = group, group.settings
            self._shelf.limit(group.settings.max_bytes)
            self._scrub.every(group.settings.scrub_interval_s)
            faults.identify(self._rank())
            self._shelf.update(lambda slots: slots_.fence(slots, group.attempt))
        if moved:
            self._pusher.try_again()

    def leave_group(self, attempt: int) -> None:
        """No rank of an attempt is its own: it keeps what it holds until that is replaced, and no free memory."""
        with self._shelf.changed:
            slots_.check_attempt(self._shelf.slots, attempt)
            self._group = None
            self._shelf.retire()

    # Its own worker writes.

    def begin(self, attempt: int, generation: Generation, num_bytes: int, writer: str, timeout_s: float) -> Grant:
        """Grants the worker a buffer, waiting until an older generation has been replaced.

        Raises:
            StaleAttemptError: A newer attempt has started.
            SnapshotTimeoutError: No buffer became free in time.
            MemoryLimitError: The node cannot give that much memory.
        """
        # A writer stores one state at a time: what it was granted before, and never heard of, is not being filled.
        self._shelf.update(lambda slots: slots_.writer_starts(slots, writer))
        slot = self._shelf.await_slot(attempt, generation, self._options.name, writer, timeout_s)
        segment = self._shelf.allocate(slot, num_bytes, self._options.name)
        return Grant(slot, segment.handle(), segment.nbytes)

    def commit(self, attempt: int, slot: int, raw_index: bytes) -> None:
        """The worker has filled the slot; the store reports it and pushes what peers are to get.

        Raises:
            StaleAttemptError: A newer attempt has started.
            StoreError: The slot is not this attempt's.
            ValueError: The index is none, or lacks digests.
        """
        with self._shelf.changed:
            slots_.commit(self._shelf.slots, slot, attempt)
        content = Content.own(raw_index, verify=self._settings.verify)
        self._shelf.commit(slot, attempt, content)
        index = content.indices[0]
        faults.reach("committed", index.generation.step)
        self._tell(index.generation)
        self._push_own(index)
        self._shelf.prepare(self._options.name)

    def cancel(self, slot: int) -> None:
        """The worker failed to fill the slot and does not touch it again."""
        self._shelf.update(lambda slots: slots_.cancel(slots, slot))

    # Peers write (called by the Flight server).

    def begin_receive(self, header: PushHeader) -> np.ndarray:
        """A buffer for what a peer pushes; waits for one, bounded. See `transfer.Provider`."""
        return self._intake.begin(header, verify=self._settings.verify)

    def end_receive(self, header: PushHeader, ok: bool) -> None:
        """The push is over: verified, or failed."""
        if self._intake.end(header, ok=ok):
            generation = Generation.parse(header.generation)
            faults.reach("received", generation.step)
            self._tell(generation)
            if _AGAIN not in header.source:
                self._shelf.prepare(header.source)

    # Reading.

    def read(self, generation: str, part: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a held part, not copied. See `transfer.Provider`."""
        segment, start, size = self._shelf.find(Generation.parse(generation), part)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise StoreError(f"{part} of generation {generation} has {size} bytes; asked for {nbytes} at {offset}.")
        return segment.view().data[start + offset : start + offset + nbytes]

    def view(self, generation: Generation) -> tuple[StoreView, list[RankIndex]]:
        """Where this store's parts of a generation lie, and the indices it holds of it."""
        places, indices, own = self._shelf.view(generation)
        return StoreView(self._options.name, self._options.node_id, self._server.address, places, own), indices

    def verify(self, generation: Generation) -> Held | None:
        """Digests everything held of a generation again, drops what is bad, and says what there is then."""
        faults.reach("verify", generation.step)
        bad = self._shelf.verify(generation)
        if bad:
            logger.warning("Parts %s of step %d are damaged here.", sorted(bad), generation.step)
        return self._shelf.report(generation, self._incarnation)

    def drop(self, generation: Generation, parts: frozenset[str]) -> Held | None:
        """Somebody else knows that these parts are bad. Says what there is then."""
        self._shelf.drop(generation, parts)
        return self._shelf.report(generation, self._incarnation)

    def lease(self, hold: Lease) -> None:
        """Keeps a generation readable. Raises StaleAttemptError or StoreError (nothing held)."""
        self._shelf.update(lambda slots: slots_.lease(slots, hold))

    def unlease(self, lease_id: str) -> None:
        """Ends a lease."""
        self._shelf.update(lambda slots: slots_.unlease(slots, lease_id))

    def release(self, generations: Iterable[Generation]) -> None:
        """These are abandoned, or better covered newer ones replace them."""
        gone = set(generations)
        self._pusher.forget(gone)
        self._shelf.release(gone)

    def stand_in(self, raw_index: bytes) -> None:
        """Keeps the index of a rank that did not live to store its own, and had nothing to itself.

        Raises:
            SnapshotLostError: Nothing of its generation is held.
        """
        generation = Index.from_bytes(raw_index).generation
        with self._shelf.changed:
            held = self._shelf.held(generation)
            if not held:
                raise SnapshotLostError(f"Store {self._options.name} does not hold generation {generation}.")
            held[0][0].adopt(raw_index)
        self._tell(generation)

    # For storage: see `Uploads`.

    def upload(
        self, to: Destination, hold: Lease, plan: DirectoryPlan, writer: int, pace: Pace
    ) -> dict[str, FileRecord]:
        """Writes this store's share of a checkpoint, of what is leased to it."""
        return self._uploads.write(to, hold, plan, writer, pace)

    def finish_upload(self, to: Destination, plan: DirectoryPlan, records: dict[str, FileRecord], retries: int) -> None:
        """Makes what has been written a checkpoint."""
        self._uploads.commit(to, plan, records, retries)

    def discard_upload(self, to: Destination) -> None:
        """Removes what has been written."""
        self._uploads.discard(to)

    def clear_upload(self, to: Destination) -> None:
        """Removes what an earlier driver left unfinished."""
        self._uploads.clear(to)

    def remove_checkpoint(self, to: Destination) -> None:
        """Removes a checkpoint."""
        self._uploads.remove(to)

    def probe_storage(self, to: Destination, what: Literal["write", "look", "remove"]) -> bool:
        """Writes, looks for, or removes a probe."""
        return self._uploads.probe(to, what)

    def push(self, generation: Generation, parts: tuple[str, ...], target: str, address: str) -> None:
        """Copies held parts to another store (re-replication). Returns at once; the receiver reports what arrived."""
        # A source of its own: what this store has pushed there before may be in use, or damaged.
        attempt, source = self._shelf.slots.attempt, f"{self._options.name}{_AGAIN}{next(self._pushes)}"
        self._pusher.enqueue(PushJob(generation, parts, attempt, target, target=(target, address), source=source))

    # Inside.

    def _rank(self) -> int | None:
        addresses = self._group.addresses if self._group is not None else {}
        return next((rank for rank, address in addresses.items() if address == self._server.address), None)

    def _tell(self, generation: Generation) -> None:
        report = self._shelf.report(generation, self._incarnation)
        if report is not None and self._coordinator is not None:
            self._coordinator.held.remote(report)

    def _push_own(self, index: Index) -> None:
        for job in pushes.own_jobs(index.generation, index.layout.parts):
            self._pusher.enqueue(job)

    def _send(self, job: PushJob) -> None:
        """One push, in a thread of the pusher. The lease keeps its bytes from being reused half way."""
        address = job.target[1] if job.target else self._peer_address(job)
        hold = Lease(f"push {uuid.uuid4().hex}", job.generation, None)
        try:
            self.lease(hold)
        except StoreError as error:
            raise SnapshotLostError(str(error)) from error
        try:
            faults.reach("push", job.generation.step)
            header, buffers = self._materialize(job)
            streams = streams_for(header.total_bytes, min(self._settings.streams, PUSH_STREAMS))
            self._clients.push(address, header, buffers, timeout_s=self._options.timeout_s, streams=streams)
        except IntegrityError:
            # The network, or this copy: if it is bad, others are to be asked.
            if self._settings.verify and self._shelf.verify(job.generation):
                self._tell(job.generation)
            raise
        finally:
            self.unlease(hold.id)

    def _peer_address(self, job: PushJob) -> str:
        """Flight address of a rank's store. They may still be on their way when the first snapshot is committed."""
        with self._shelf.changed:
            self._shelf.changed.wait_for(
                lambda: self._group is not None and self._group.attempt >= job.attempt, self._options.timeout_s
            )
            group = self._group
        return pushes.receiver(job, group.attempt if group else None, group.addresses if group else {})

    def _materialize(self, job: PushJob) -> tuple[PushHeader, list[memoryview]]:
        """Header and bytes of a push, looked up when it is its turn."""
        pieces = self._shelf.pieces(job.generation, job.parts)
        return push_message(job, job.source or self._options.name, pieces)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            if os.getppid() != self._raylet:
                # A node whose raylet died is dead to the cluster; a store that went on answering would be a zombie.
                os._exit(0)
            if time.monotonic() - self._last_heartbeat > self._options.orphan_timeout_s:
                logger.warning("%s: no sign of life of its run, ending.", self._options.name)
                os._exit(0)
            try:
                self._forget_dead_writers()
                self._break_silence()
            except Exception:
                logger.exception("%s: looking after its buffers failed; trying again.", self._options.name)

    def _break_silence(self) -> None:
        """A coordinator that was started again has forgotten its stores: it does not ask, and is told."""
        now = time.monotonic()
        if min(now - self._last_heartbeat, now - self._last_word) < SILENCE_S:
            return
        self._last_word = now
        for generation in self._shelf.slots.generations():
            self._tell(generation)

    def _forget_dead_writers(self) -> None:
        writers = {slot.writer for slot in self._shelf.slots.used.values() if slot.writer}
        dead = {writer for writer in writers if not process_alive(*map(int, writer.split(":")))}
        for writer in dead:
            self._shelf.update(lambda slots, writer=writer: slots_.writer_gone(slots, writer))
        if dead - self._dead_writers:
            sweep_scratch()
        self._dead_writers = dead


def writer_identity() -> str:
    """Identity of the calling process as a writer, safe against reuse of process ids."""
    return f"{os.getpid()}:{process_start_time(os.getpid())}"
