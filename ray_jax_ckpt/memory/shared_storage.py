"""Whether the stores of all nodes write to the same storage."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.actor import ActorHandle

from ray_jax_ckpt.errors import PersistError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.uploads import Destination
from ray_jax_ckpt.storage.runs import FOLDER

Answer = Callable[[Any], Awaitable[Any]]
MAX_NAMED = 3
TIMEOUT_S = 60.0


class SharedStorage:
    """For use in one event loop.

    Where each node has a disk of its own at the run's path, each store would write its share without an error, and
    nobody would ever find the whole. So a file that one store writes has to be seen by all the others.

    Args:
        run: Whose directory it is about.
        timeout_s: Bound of what each store does; of all, a minute.
        answer: Awaits what a store returns, or raises an error of this package.
    """

    def __init__(self, run: RunIdentity, timeout_s: float, answer: Answer) -> None:
        self._run, self._timeout_s, self._answer = run, timeout_s, answer
        self._problem = ""

    async def check(self, stores: Mapping[str, ActorHandle]) -> None:
        """Returns if all of these stores, which are those of a new group, see the same files.

        Raises:
            PersistError: They do not, or storage failed.
            TimeoutError: They did not say so in time.
        """
        self._problem = ""
        if len(stores) < 2:
            return
        blind = await asyncio.wait_for(self._blind(stores), TIMEOUT_S)
        if blind:
            self._problem = self._describe(blind, len(stores))
            self.demand()

    def demand(self) -> None:
        """Raises PersistError if it has been found that stores do not see the same files."""
        if self._problem:
            raise PersistError(self._problem)

    async def _blind(self, stores: Mapping[str, ActorHandle]) -> list[str]:
        """Nodes that do not see what another one has written."""
        assert self._run.filesystem is not None
        first, *others = stores
        path = f"{self._run.path.rstrip('/')}/{FOLDER}/probe-{uuid.uuid4().hex[:8]}"
        to = Destination(self._run.filesystem, path, self._run.rebuild, min(self._timeout_s, TIMEOUT_S))
        try:
            await self._answer(stores[first].probe_storage.remote(to, "write"))
            seen = await asyncio.gather(*(self._answer(stores[one].probe_storage.remote(to, "look")) for one in others))
        finally:
            stores[first].probe_storage.remote(to, "remove")
        return sorted({one.split(":")[1] for one, sees in zip(others, seen, strict=True) if not sees})

    def _describe(self, blind: list[str], num_stores: int) -> str:
        named = ", ".join(blind[:MAX_NAMED]) + (", ..." if len(blind) > MAX_NAMED else "")
        return (
            f"{self._run.path} is not the same directory on all nodes: of {num_stores} stores, those on {named} do not "
            "see a file that another one has written. RunConfig.storage_path has to be on a disk that all nodes share "
            "(such as NFS), or remote (such as s3://)."
        )
