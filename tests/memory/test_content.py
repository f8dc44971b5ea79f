"""What a store's buffer holds, and what it takes in: without a cluster."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import AlreadyHeldError, IntegrityError, MemoryLimitError, StaleAttemptError
from ray_jax_ckpt.memory import scrub as scrub_
from ray_jax_ckpt.memory.content import Content, push_message
from ray_jax_ckpt.memory.intake import Intake
from ray_jax_ckpt.memory.scrub import Scrub
from ray_jax_ckpt.memory.shelf import Shelf
from ray_jax_ckpt.memory.transfer import PushHeader
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.index import Index, Layout, lay_out
from ray_jax_ckpt.model.pushes import PushJob
from ray_jax_ckpt.model.shards import Generation

G = Generation(1, 0, 10)
SIZES = (1000, 0, 37)
BYTES = np.frombuffer(np.random.default_rng(0).bytes(4096), np.uint8)


def layout(rank: int = 0, shared: str = "s0>1") -> Layout:
    items = [(leaf, ((0, size),), size) for leaf, size in enumerate(SIZES)]
    parts = lay_out([(shared, (1,), rank == 0, items), (f"h{rank}", (1,), True, [])])
    return Layout(rank, 2, "structure", ({"path": "a"}, {"path": "b"}, {"path": "c"}), frozenset(), parts)


def index(buffer: np.ndarray, rank: int = 0, shared: str = "s0>1") -> Index:
    one = layout(rank, shared)
    digests = {p.id: [digest(buffer[p.offset + i.offset :][: i.num_bytes]) for i in p.items] for p in one.parts}
    return Index(G, one, digests)


def own(buffer: np.ndarray, **changes) -> Content:
    return Content.own(index(buffer, **changes).to_bytes(), verify=True)


def message(buffer: np.ndarray, *parts: str, source: str = "peer") -> tuple[PushHeader, bytes]:
    pieces = [(own(buffer), buffer, part) for part in parts or ("s0>1", "h0")]
    header, buffers = push_message(PushJob(G, (), 1, "lane"), source, pieces)
    return header, b"".join(buffers)


def damaged() -> np.ndarray:
    copy = BYTES.copy()
    copy[1030] ^= 1
    return copy


@pytest.fixture
def shelf() -> Shelf:
    return Shelf("me", per_source=2, attempt=1)


@pytest.fixture
def intake(shelf: Shelf) -> Intake:
    return Intake(shelf, timeout_s=1)


def take(intake: Intake, header: PushHeader, data: bytes) -> None:
    buffer = intake.begin(header, verify=True)
    buffer[:] = np.frombuffer(data, np.uint8)
    intake.end(header, ok=True)


def held_bytes(shelf: Shelf, part: str) -> bytes:
    segment, offset, size = shelf.find(G, part)
    return segment.view()[offset : offset + size].tobytes()


# What is intact.


def test_a_flipped_byte_in_any_item_is_found_and_padding_does_not_count():
    content = own(BYTES)
    assert content.intact("s0>1", BYTES)
    assert not content.intact("s0>1", damaged())
    padding = BYTES.copy()
    padding[1001] ^= 1
    assert content.intact("s0>1", padding)


@pytest.mark.parametrize("lacking", [[], ["xxh3:1", "xxh3:2"], ["", "xxh3:1", "xxh3:2"]])
def test_a_missing_digest_is_never_a_pass(lacking):
    whole = index(BYTES)
    bare = replace(whole, digests=dict(whole.digests) | {"s0>1": lacking}).to_bytes()
    with pytest.raises(ValueError, match=r"digests? .*part"):
        Content.own(bare, verify=True)
    gone = replace(whole, digests={}).to_bytes()
    with pytest.raises(ValueError, match="0 digests for 3 items of part s0>1"):
        Content.own(gone, verify=True)


def test_what_was_taken_without_digests_fails_once_digests_are_asked_for():
    bare = index(BYTES)
    bare = replace(bare, digests={part: [""] * len(texts) for part, texts in bare.digests.items()})
    content = Content.own(bare.to_bytes(), verify=False)
    assert not content.intact("s0>1", BYTES)
    assert content.digests().keys() == {"h0"}


# What is taken in.


def test_what_arrives_is_held_and_told_with_the_digests_of_its_parts(shelf, intake):
    take(intake, *message(BYTES))
    report = shelf.report(G, "one")
    assert report is not None
    assert report.parts == {"s0>1", "h0"}
    assert report.digests == own(BYTES).digests()
    assert report.claims == {part: (0, text) for part, text in report.digests.items()}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"digests": ()}, "items without a digest in parts"),
        ({"total_bytes": 1 << 40}, "in a push of 1099511627776 bytes"),
        ({"meta": "[]"}, "is not as its index says"),
        ({"meta": "nonsense"}, "Expecting value"),
        ({"generation": "yesterday"}, "."),
        ({"attempt": 0}, "has been replaced"),
    ],
)
def test_a_push_that_is_not_what_it_says_gets_no_memory(shelf, intake, changes, why):
    header, _ = message(BYTES)
    with pytest.raises((ValueError, StaleAttemptError), match=why):
        intake.begin(replace(header, **changes), verify=True)
    assert shelf.num_bytes == 0
    assert not shelf.slots.used


def test_a_digest_that_is_dropped_on_the_way_is_missed(intake):
    header, _ = message(BYTES)
    with pytest.raises(IntegrityError, match="without a digest"):
        intake.begin(replace(header, digests=header.digests[1:]), verify=True)
    assert intake.begin(replace(header, digests=header.digests[1:]), verify=False).nbytes == header.total_bytes


def test_a_part_that_claims_more_bytes_than_its_index_describes_is_refused(shelf, intake):
    header, _ = message(BYTES, "s0>1")
    spans = (replace(header.parts[0], nbytes=1 << 40),)
    with pytest.raises(ValueError, match="not as its index says"):
        intake.begin(replace(header, parts=spans, total_bytes=1 << 40), verify=True)
    assert shelf.num_bytes == 0


def test_a_push_beyond_what_the_store_may_take_is_refused_and_leaves_nothing():
    shelf = Shelf("me", per_source=2, attempt=1, max_bytes=1024)
    with pytest.raises(MemoryLimitError, match="of the limit of 1024 bytes"):
        Intake(shelf, timeout_s=1).begin(message(BYTES)[0], verify=True)
    assert not shelf.slots.used
    shelf.limit(1 << 20)
    take(Intake(shelf, timeout_s=1), *message(BYTES))


def test_the_same_parts_are_not_taken_twice(shelf, intake):
    header, data = message(BYTES)
    buffer = intake.begin(header, verify=True)
    with pytest.raises(AlreadyHeldError):
        intake.begin(replace(header, source="another"), verify=True)
    buffer[:] = np.frombuffer(data, np.uint8)
    intake.end(header, ok=True)
    with pytest.raises(AlreadyHeldError):
        intake.begin(replace(header, source="another"), verify=True)
    assert len(shelf.slots.used) == 1


# Damage and repair.


def spoil(shelf: Shelf, part: str) -> None:
    segment, offset, _ = shelf.find(G, part)
    segment.view()[offset + 1030] ^= 1


def test_a_bad_part_is_dropped_and_repaired_in_its_place(shelf, intake):
    take(intake, *message(BYTES))
    before = shelf.num_bytes
    spoil(shelf, "s0>1")
    assert shelf.verify(G) == {"s0>1"}
    report = shelf.report(G, "one")
    assert report is not None
    assert (report.parts, report.damaged) == ({"h0"}, {"s0>1"})
    assert "s0>1" not in report.digests
    header, data = message(BYTES, "s0>1", source="peer again 1")
    take(intake, header, data)
    assert held_bytes(shelf, "s0>1") == data
    assert shelf.verify(G) == frozenset()
    assert shelf.num_bytes == before
    assert not shelf.slots.leases
    report = shelf.report(G, "one")
    assert report is not None
    assert report.damaged == frozenset()


def test_a_repair_that_fails_leaves_the_part_out_and_may_be_tried_again(shelf, intake):
    take(intake, *message(BYTES))
    spoil(shelf, "s0>1")
    shelf.verify(G)
    header, data = message(BYTES, "s0>1", source="peer again 1")
    intake.begin(header, verify=True)
    intake.end(header, ok=False)
    report = shelf.report(G, "one")
    assert report is not None
    assert report.damaged == {"s0>1"}
    take(intake, header, data)
    assert shelf.verify(G) == frozenset()


def test_a_buffer_under_repair_is_not_given_to_another_writer(shelf, intake):
    take(intake, *message(BYTES))
    spoil(shelf, "s0>1")
    shelf.verify(G)
    header, _ = message(BYTES, "s0>1", source="peer again 1")
    intake.begin(header, verify=True)
    shelf.release([G])
    assert len(shelf.slots.used) == 1
    intake.end(header, ok=True)
    assert not shelf.slots.used


def test_a_part_repaired_with_another_ranks_bytes_is_compared_with_that_ranks_digests(shelf, intake):
    wrong = damaged()
    slot = shelf.await_slot(1, G, "me", "1:1", 1)
    shelf.allocate(slot, 4096, "me").view()[:4096] = wrong
    shelf.commit(slot, 1, own(wrong, rank=1))
    shelf.drop(G, ["s0>1"])
    take(intake, *message(BYTES, "s0>1"))
    assert shelf.verify(G) == frozenset()
    report = shelf.report(G, "one")
    assert report is not None
    assert report.digests["s0>1"] == own(BYTES).digests()["s0>1"]
    assert report.claims["s0>1"] == (1, own(wrong).digests()["s0>1"])
    header, _ = push_message(PushJob(G, (), 1, "lane"), "me", shelf.pieces(G, ["s0>1"]))
    assert {text for *_, text in header.digests} == {text for *_, text in message(BYTES, "s0>1")[0].digests}


def test_what_was_freed_while_it_was_looked_at_is_no_damage(shelf, intake):
    take(intake, *message(BYTES))
    (content, _), *_ = shelf.held(G)
    shelf.update(lambda slots: slots_.release(slots, [G]))
    assert shelf.drop_bad(content, ["s0>1"]) == frozenset()


# The background check.


def test_the_background_check_drops_what_went_bad_and_tells(shelf, intake):
    take(intake, *message(BYTES))
    told = []
    scrub = Scrub(shelf, told.append)
    scrub.once()
    assert told == []
    spoil(shelf, "s0>1")
    scrub.once()
    assert told == [G]
    report = shelf.report(G, "one")
    assert report is not None
    assert report.damaged == {"s0>1"}
    scrub.once()
    assert told == [G]


def test_the_background_check_rests_in_proportion_to_its_work(shelf, intake, monkeypatch):
    take(intake, *message(BYTES))
    clock, rests = itertools.count(), []
    monkeypatch.setattr(scrub_.time, "thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(scrub_.time, "sleep", rests.append)
    monkeypatch.setattr(scrub_, "PIECE_BYTES", 100)
    Scrub(shelf, lambda _: None).once()
    pieces = 10 + 1  # of the items of 1000 and of 37 bytes
    assert sum(rests) == pytest.approx(pieces * (1 - scrub_.DUTY) / scrub_.DUTY)


def test_the_background_check_leaves_alone_what_is_freed_meanwhile(shelf, intake, monkeypatch):
    take(intake, *message(BYTES))
    told = []

    def reuse(_: float) -> None:
        if shelf.held(G):
            shelf.release([G])
            shelf.allocate(shelf.await_slot(1, replace(G, step=20), "peer", "", 1), 4096, "peer").view()[:] = 0

    monkeypatch.setattr(scrub_.time, "sleep", reuse)
    monkeypatch.setattr(scrub_, "PIECE_BYTES", 100)
    monkeypatch.setattr(scrub_, "_MIN_PAUSE_S", 0.0)
    Scrub(shelf, told.append).once()
    assert told == []


def test_the_background_check_starts_by_itself_and_can_be_turned_off(shelf, intake):
    take(intake, *message(BYTES))
    spoil(shelf, "s0>1")
    found = threading.Event()
    scrub = Scrub(shelf, lambda _: found.set())
    scrub.every(None)
    assert not any(thread.name == "scrub" for thread in threading.enumerate())
    scrub.every(3600.0)
    scrub.every(0.01)
    assert found.wait(30)
    scrub.every(None)
