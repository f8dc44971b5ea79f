"""Whether the stores of all nodes write to the same storage."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ray.actor import ActorHandle

from ray_jax_ckpt.errors import CheckpointError, PersistError
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.memory.replies import reply
from ray_jax_ckpt.memory.uploads import Destination
from ray_jax_ckpt.storage.runs import FOLDER

logger = logging.getLogger(__name__)

MAX_NAMED = 3
TIMEOUT_S = 60.0


class SharedStorage:
    """For use in one event loop.

    Where each node has a disk of its own at the run's path, each store would write its share without an error, and
    nobody would ever find the whole. So a file that one store writes has to be seen from all other nodes.

    Args:
        run: Whose directory it is about.
        timeout_s: Bound of what each store does; of all, a minute.
        driver: For whom.
        record: Notes events.
    """

    def __init__(self, run: RunIdentity, timeout_s: float, driver: str, record: Callable[..., None]) -> None:
        self._run, self._timeout_s, self._driver, self._record = run, timeout_s, driver, record
        self._checking: asyncio.Task[None] | None = None
        self._problem = ""

    def begin(self, stores: Mapping[str, ActorHandle]) -> None:
        """Begins to look whether a new group's stores, one by node, see the same files. Says so if they do not."""
        self._problem = ""
        if len(stores) > 1 and self._run.filesystem is not None:
            self._checking = asyncio.get_running_loop().create_task(self._check(stores))

    async def demand(self) -> None:
        """Waits until that is known. Raises PersistError if they do not."""
        if self._checking is not None:
            await asyncio.wait([self._checking], timeout=TIMEOUT_S)
        if self._problem:
            raise PersistError(self._problem)

    async def _check(self, stores: Mapping[str, ActorHandle]) -> None:
        try:
            blind = await asyncio.wait_for(self._blind(stores), TIMEOUT_S)
        except (CheckpointError, TimeoutError) as error:
            said = str(error) or f"it did not answer within {TIMEOUT_S:g} s"
        else:
            said = self._problem = self._describe(blind, len(stores)) if blind else ""
        if said:
            logger.warning("Checkpoints will not reach storage as it is now: %s", said)
            self._record("storage_unfit", error=said[:1000])

    async def _blind(self, stores: Mapping[str, ActorHandle]) -> list[str]:
        """Nodes that do not see what another one has written."""
        first, *others = stores
        path = f"{self._run.path.rstrip('/')}/{FOLDER}/probe-{uuid.uuid4().hex[:8]}"
        to = Destination.of(self._run, path, min(self._timeout_s, TIMEOUT_S), self._driver)

        def probe(node: str, what: str) -> Any:
            return stores[node].probe_storage.remote(to, what)

        try:
            await reply(probe(first, "write"))
            seen = await asyncio.gather(*(reply(probe(node, "look")) for node in others))
        finally:
            probe(first, "remove")
        return sorted(node for node, sees in zip(others, seen, strict=True) if not sees)

    def _describe(self, blind: list[str], num_nodes: int) -> str:
        named = ", ".join(blind[:MAX_NAMED]) + (", ..." if len(blind) > MAX_NAMED else "")
        return (
            f"{self._run.path} is not the same directory on all nodes: of {num_nodes}, {named} do not see a file that "
            "another one has written. RunConfig.storage_path has to be on a disk that all nodes share, such as NFS, "
            "or remote, such as s3://."
        )
