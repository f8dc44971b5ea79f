"""A worker group whose ranks all live in the test's process, over real stores and a real coordinator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from support import new_run

import ray_jax_ckpt as rjc
from ray_jax_ckpt import session
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Member, RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.model.choice import Resume


class Group:
    """A worker group whose ranks all live in this process, as the manager's hooks start it."""

    def __init__(
        self,
        nodes: list[tuple[str, str]],
        run: str | None = None,
        *,
        directory: RunIdentity | None = None,
        persist: rjc.PersistConfig | None = None,
    ) -> None:
        self.nodes, self.run = nodes, run or new_run()
        self.directory = directory or RunIdentity(self.run, f"/nowhere/{self.run}", None)
        self.persist, self.resume = persist, Resume()
        self.coordinator: Any = None
        self.sessions: list[session.Session] = []
        self.step = 0
        self._of_thread = threading.local()

    def begin(self, **settings: Any) -> list[session.Session]:
        """A new attempt; settings are those of SnapshotConfig, and count from the first attempt on."""
        config = rjc.SnapshotConfig(**{"every_n_steps": 1, "copies": 1, "timeout_s": 20} | settings)
        if self.coordinator is None:
            where = self.nodes[0][0]
            self.coordinator = start_coordinator(self.directory, config, where, self.persist, resume=self.resume)
        seen: list[str] = []
        members = []
        for rank, (node, ip) in enumerate(self.nodes):
            members.append(Member(rank, node, ip, seen.count(node), node))
            seen.append(node)
        decision = ray.get(self.coordinator.begin_attempt.remote(tuple(members)), timeout=60)
        wiring = session.Wiring(self.coordinator, config, self.persist)
        self.sessions = [session.Session(wiring, decision, rank) for rank in range(len(members))]
        self.step = 0
        return self.sessions

    def current(self) -> session.Session:
        """The session of the rank that this thread is; rank 0 if it is none."""
        return self.sessions[getattr(self._of_thread, "rank", 0)]

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        self._of_thread.rank = rank
        try:
            yield
        finally:
            del self._of_thread.rank

    def all_ranks(self, action: Callable[[int], Any]) -> list[Any]:
        """What every rank gets from an action, or the exception that it raises."""

        def run(rank: int) -> Any:
            with self.as_rank(rank):
                try:
                    return action(rank)
                except Exception as error:
                    return error

        with ThreadPoolExecutor(len(self.sessions)) as pool:
            return list(pool.map(run, range(len(self.sessions))))

    def snapshot(self, state: Any, **options: Any) -> Any:
        """At the next step, by this thread's rank."""
        self.step += 1
        return rjc.snapshot(self.step, state, **options)

    def trip(self, state: Any, template: Any = None, **options: Any) -> Any:
        """The state after a snapshot, and a restore into the template."""
        return rjc.restore(self.snapshot(state), template, **options).state

    def checkpoint(self) -> Any:
        """What `ray.train.get_checkpoint()` gives in this attempt."""
        located = self.sessions[0].decision.located
        return None if located is None else SnapshotCheckpoint(located.generation)

    def stores(self) -> dict[str, Any]:
        return fleet.living_stores(self.run)

    def close(self) -> None:
        if self.coordinator is not None:
            ray.kill(self.coordinator)
        for handle in self.stores().values():
            ray.kill(handle)
