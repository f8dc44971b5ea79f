"""A store's buffers: who may write, what is kept, what a new attempt takes away."""

from __future__ import annotations

import pytest

from ray_jax_ckpt.errors import StaleAttemptError, StoreError
from ray_jax_ckpt.model import slots as slots_
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.model.slots import Lease, Phase, Slots

G1, G2, G3, G4 = (Generation(1, 0, step) for step in (10, 20, 30, 40))


def granted(slots: Slots, generation: Generation, source: str = "me", attempt: int = 1) -> tuple[Slots, int]:
    slots, key = slots_.grant(slots, generation, source, attempt, "42:7")
    assert key is not None
    return slots, key


def filled(slots: Slots, generation: Generation, source: str = "me") -> Slots:
    slots, key = granted(slots, generation, source)
    return slots_.commit(slots, key, 1)


def test_a_source_has_two_buffers_and_waits_for_one_when_both_are_taken():
    slots = filled(filled(Slots("me"), G1), G2)
    assert slots_.grant(slots, G3, "me", 1, "42:7")[1] is None
    assert slots_.grant(slots, G3, "peer", 1, "")[1] is not None
    assert slots_.grant(slots_.release(slots, [G1]), G3, "me", 1, "42:7")[1] is not None


def test_only_committed_buffers_hold_something():
    slots, key = granted(Slots("me"), G1)
    assert slots.generations() == set()
    assert slots.holding(G1) == {}
    assert slots_.commit(slots, key, 1).generations() == {G1}


def test_the_same_generation_is_not_taken_twice_from_one_source():
    slots = filled(Slots("me"), G1)
    with pytest.raises(StoreError, match="already has"):
        slots_.grant(slots, G1, "me", 1, "42:7")


def test_older_attempts_can_neither_begin_nor_commit():
    slots, key = granted(Slots("me"), G1)
    slots = slots_.fence(slots, 2)
    with pytest.raises(StaleAttemptError, match="attempt 1"):
        slots_.grant(slots, G2, "me", 1, "42:7")
    with pytest.raises(StaleAttemptError, match="attempt 1"):
        slots_.commit(slots, key, 1)


def test_a_half_filled_buffer_passes_on_only_when_its_writer_is_gone():
    slots, key = granted(Slots("me", per_source=1), G1)
    slots = slots_.fence(slots, 2)
    assert slots.used[key].phase is Phase.STRANDED
    assert slots_.grant(slots, G2, "me", 2, "43:8")[1] is None
    slots = slots_.writer_gone(slots, "42:7")
    assert slots_.grant(slots, G2, "me", 2, "43:8")[1] is not None


def test_what_is_held_survives_the_fence_and_the_death_of_its_writer():
    slots = slots_.writer_gone(slots_.fence(filled(Slots("me"), G1), 2), "42:7")
    assert slots.generations() == {G1}


def test_fencing_is_for_ever_and_older_fences_change_nothing():
    slots = slots_.fence(Slots("me"), 3)
    assert slots_.fence(slots, 2) == slots


def test_a_leased_generation_stays_readable_until_its_last_lease_ends():
    slots = filled(Slots("me"), G1)
    for name in ("one", "two"):
        slots = slots_.lease(slots, Lease(name, G1, 1))
    slots = slots_.release(slots, [G1])
    assert slots.holding(G1)
    assert slots.generations() == set()
    slots = slots_.unlease(slots, "one")
    assert slots.holding(G1)
    assert slots_.unlease(slots, "two").used == {}


def test_one_kept_generation_does_not_stop_snapshots_and_two_do():
    slots = slots_.lease(filled(Slots("me"), G1), Lease("handle", G1, 1))
    slots = filled(filled(slots_.release(slots, [G1]), G2), G3)
    again = Generation(1, 0, 40)
    assert slots_.grant(slots, again, "me", 1, "42:7")[1] is None
    assert slots_.grant(slots_.release(slots, [G2]), again, "me", 1, "42:7")[1] is not None
    slots = slots_.release(slots_.lease(slots, Lease("second", G2, 1)), [G2])
    assert slots_.grant(slots, again, "me", 1, "42:7")[1] is None


def test_a_push_that_is_under_way_adds_no_buffer():
    slots = slots_.lease(filled(filled(Slots("me"), G1), G2), Lease("push", G1, None))
    assert slots_.grant(slots, G3, "me", 1, "42:7")[1] is None


def test_leases_of_an_attempt_end_with_it_and_those_of_the_driver_do_not():
    slots = filled(filled(Slots("me"), G1), G2)
    slots = slots_.lease(slots_.lease(slots, Lease("worker", G1, 1)), Lease("push", G2, None))
    slots = slots_.fence(slots_.release(slots, [G1, G2]), 2)
    assert [slot.generation for slot in slots.used.values()] == [G2]


def test_nothing_can_be_leased_that_is_not_here():
    with pytest.raises(StoreError, match="holds nothing"):
        slots_.lease(Slots("me"), Lease("one", G1, None))


def test_a_lease_may_be_taken_while_the_buffer_is_being_filled():
    slots, key = granted(Slots("me"), G1)
    slots = slots_.lease(slots, Lease("handle", G1, 1))
    slots = slots_.release(slots_.commit(slots, key, 1), [G1])
    assert slots.holding(G1)


def test_cancelling_frees_what_was_being_filled_and_keeps_what_was_committed():
    slots, key = granted(Slots("me"), G1)
    assert slots_.cancel(slots, key).used == {}
    committed = slots_.commit(slots, key, 1)
    assert slots_.cancel(committed, key) == committed


def test_a_slot_that_was_taken_back_cannot_be_committed():
    slots, key = granted(Slots("me"), G1)
    with pytest.raises(StoreError, match="not being filled"):
        slots_.commit(slots_.cancel(slots, key), key, 1)


def test_a_buffer_that_its_writer_never_heard_of_is_free_when_it_asks_again():
    slots, _ = granted(Slots("me"), G1)
    assert slots_.writer_starts(slots, "somebody else") == slots
    assert slots_.writer_starts(slots, "42:7").used == {}
    kept = filled(Slots("me"), G1)
    assert slots_.writer_starts(kept, "42:7") == kept


def upload(generation, source="me"):
    return Lease(f"upload {generation}", generation, None, source=source, persists=True)


def test_an_upload_keeps_one_sources_buffer_and_adds_one_for_it():
    slots = filled(filled(Slots("me"), G1), G1, source="peer")
    slots = slots_.release(slots_.lease(slots, upload(G1)), [G1])
    assert [(slot.source, slot.phase) for slot in slots.used.values()] == [("me", Phase.CONDEMNED)]
    slots = filled(filled(slots, G2), G3)
    assert slots_.grant(slots, G4, "me", 1, "w")[1] is None
    slots = slots_.unlease(slots, upload(G1).id)
    assert [slot.generation for slot in slots.used.values()] == [G2, G3]


def test_an_upload_is_refused_while_another_generation_is_kept():
    slots = filled(filled(Slots("me"), G1), G2)
    held = Lease("handle", G1, 1)
    with pytest.raises(StoreError, match=r"no buffer to spare for an upload of generation 1\.0\.20: it keeps"):
        slots_.lease(slots_.lease(slots, held), upload(G2))
    assert len(slots_.lease(slots_.lease(slots, Lease("handle", G1, 1)), upload(G1)).leases) == 2
    assert len(slots_.lease(slots_.lease(slots, Lease("push", G1, None)), upload(G2)).leases) == 2


def test_an_upload_gives_way_to_a_worker_and_its_buffer_is_free():
    slots = slots_.release(slots_.lease(filled(filled(Slots("me"), G1), G2), upload(G1)), [G1])
    slots = slots_.lease(slots, Lease("handle", G2, 1))
    assert list(slots.leases) == ["handle"]
    assert [slot.generation for slot in slots.used.values()] == [G2]


def test_the_lease_of_an_upload_whose_coordinator_died_does_not_refuse_the_next_upload():
    slots = Slots("a")
    for step in (1, 2):
        slots, key = slots_.grant(slots, Generation(1, 0, step), "a", 1, "")
        slots = slots_.commit(slots, key, 1)
    slots = slots_.lease(slots, Lease("upload 1", Generation(1, 0, 1), None, persists=True))
    slots = slots_.release(slots, [Generation(1, 0, 1)])
    slots = slots_.lease(slots, Lease("upload 2", Generation(1, 0, 2), None, persists=True))
    assert list(slots.leases) == ["upload 2"]
    # What only the dead one's lease has kept is free.
    assert {slot.generation.step for slot in slots.used.values()} == {2}


def test_an_upload_of_a_driver_that_was_replaced_is_refused_and_ends_no_lease():
    active, zombie = Lease("b", G2, None, persists=True, driver="B"), Lease("a", G1, None, persists=True, driver="A")
    slots = slots_.fence(filled(filled(Slots("me", attempt=1, driver="A"), G1), G2), 2, "B")
    slots = slots_.lease(slots, active)
    for late in (zombie, Lease("a", G2, None, driver="A")):
        with pytest.raises(StaleAttemptError, match="another driver"):
            slots_.lease(slots, late)
    assert slots.leases == {"b": active}


def test_the_uploads_of_a_driver_end_when_another_one_begins_an_attempt_and_outlive_its_own():
    upload, push = Lease("a", G1, None, persists=True, driver="A"), Lease("push", G1, None)
    slots = filled(slots_.fence(Slots("me", attempt=1), 1, "A"), G1)
    slots = slots_.lease(slots_.lease(slots, upload), push)
    assert slots_.fence(slots, 2, "A").leases == slots.leases
    assert slots_.fence(slots, 2, "B").leases == {"push": push}


def test_who_comes_first_to_an_attempt_that_was_begun_namelessly_is_its_driver():
    slots = slots_.fence(Slots("me", attempt=1, driver="A"), 2)
    slots = slots_.fence(slots, 2, "B")
    assert slots_.fence(slots, 2, "A").driver == "B"


def test_an_upload_ends_the_lease_of_one_of_the_same_generation_whose_coordinator_died():
    slots = slots_.lease(filled(Slots("me"), G1), Lease("before", G1, None, persists=True, driver="A"))
    slots = slots_.lease(slots, Lease("now", G1, None, persists=True, driver="A"))
    assert set(slots.leases) == {"now"}
