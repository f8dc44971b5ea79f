"""Pushes that fail, and when they are tried again."""

from __future__ import annotations

from support import eventually

from ray_jax_ckpt.errors import StoreError
from ray_jax_ckpt.memory import pusher
from ray_jax_ckpt.memory.pusher import Pusher
from ray_jax_ckpt.model.pushes import PushJob
from ray_jax_ckpt.model.shards import Generation

JOB = PushJob(Generation(1, 0, 10), ("part",), 1, "rank 1", rank=1)


class Peer:
    """Refuses until it is up."""

    def __init__(self):
        self.up = False
        self.refused = 0
        self.received = []

    def send(self, job):
        if not self.up:
            self.refused += 1
            raise StoreError("connection refused")
        self.received.append(job)


def test_a_push_to_a_store_that_was_replaced_does_not_wait_for_its_next_try(monkeypatch):
    monkeypatch.setattr(pusher, "RETRY_DELAYS_S", (3600.0,))
    peer = Peer()
    pushes = Pusher(peer.send)
    pushes.enqueue(JOB)
    # It has as many tries with each receiver as with the first one.
    for tries in (1, 2, 3):
        eventually(lambda tries=tries: peer.refused == tries)
        pushes.try_again()
    eventually(lambda: peer.refused == 4)
    peer.up = True
    pushes.try_again()
    eventually(lambda: peer.received == [JOB])


def test_a_push_is_given_up_after_its_tries(monkeypatch, caplog):
    monkeypatch.setattr(pusher, "RETRY_DELAYS_S", (0.01, 0.01))
    peer = Peer()
    pushes = Pusher(peer.send)
    pushes.enqueue(JOB)
    eventually(lambda: "stays with fewer copies" in caplog.text)
    assert peer.refused == 3
