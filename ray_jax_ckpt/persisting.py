"""A worker's part in what the stores write to storage: metadata that only JAX can make, and failures to be told of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from ray_jax_ckpt.arrays.tree import Flat, describe, flatten
from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.errors import PersistError, UnsupportedLeafError
from ray_jax_ckpt.missing_score import MissingScore
from ray_jax_ckpt.storage.names import leaf_names
from ray_jax_ckpt.storage.plan import pack_orbax
from ray_jax_ckpt.values import encode_value

logger = logging.getLogger(__name__)


def _describe_if_possible(flat: Flat) -> str:
    """For what may be reported, or only kept in memory, which takes more than a checkpoint does."""
    try:
        return describe_for_orbax(flat)
    except UnsupportedLeafError as error:
        logger.warning("Snapshots of this state can be restored, but not reported as checkpoints: %s", error)
        return ""


def describe_for_orbax(flat: Flat) -> str:
    """`Layout.orbax` of a state.

    Raises:
        UnsupportedLeafError: A checkpoint cannot hold it; the message says why.
    """
    # Orbax takes seconds to import, and only those who write to storage need it.
    from ray_jax_ckpt.storage.orbax_metadata import orbax_files

    specs = [describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
    leaf_names(specs)
    values = {n: encode_value(flat.leaves[n]) for n, spec in enumerate(specs) if spec.kind == "value"}
    return pack_orbax(orbax_files(flat, values))


class StorageSide:
    """What a session does for storage, in the training thread. It never waits for an answer.

    Args:
        config: The user's; None: nothing is written but what is reported.
        coordinator: Who knows of failures.
        ask: Gets the answer of a call that has one.

    Attributes:
        persists: Whether the stores write by themselves.
        score: Metric that checkpoints are ranked by, or None.
        missing_score: Misses that.
    """

    def __init__(self, config: PersistConfig | None, coordinator: ActorHandle, ask: Callable[[Any], Any]) -> None:
        self.persists = config is not None
        self.score = config.score_attribute if config is not None else None
        self.missing_score = MissingScore(self.score)
        self._limit = config.fail_after if config is not None else None
        self._coordinator, self._ask = coordinator, ask
        self._asked: Any = None

    def prepare(self) -> None:
        """Spares the first snapshot the seconds that it takes to import Orbax."""
        if self.persists:
            arguments = (flatten({}),)
            threading.Thread(target=describe_for_orbax, args=arguments, name="rjc-import", daemon=True).start()

    def describer(self, force: bool) -> Callable[[Flat], str] | None:
        """What makes `Layout.orbax` of a snapshot; None if it can do without: it will not be written anywhere."""
        if self.persists:
            return describe_for_orbax
        return _describe_if_possible if force else None

    def check(self) -> None:
        """Raises PersistError if so many checkpoints in a row could not be written (`PersistConfig.fail_after`)."""
        if self._limit is None:
            return
        if self._asked is None:
            self._asked = self._coordinator.persist_problem.remote()
        elif ray.wait([self._asked], timeout=0)[0]:
            problem, self._asked = self._ask(self._asked), None
            if problem:
                raise PersistError(
                    f"Storage has failed {self._limit} times or more in a row (PersistConfig.fail_after), the last "
                    f"time like this: {problem}"
                )
