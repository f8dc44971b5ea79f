"""Which copies were asked for lately: a large one that is under way must not be sent twice."""

from __future__ import annotations

import time
from dataclasses import replace

from ray_jax_ckpt.model.books import Books
from ray_jax_ckpt.model.pushes import Copies
from ray_jax_ckpt.model.shards import Generation


class Asked:
    """Remembers them for a while."""

    def __init__(self) -> None:
        self._at: dict[tuple[Generation, str, str, str | None, str], float] = {}

    def new(self, copies: Copies, books: Books, timeout_s: float) -> Copies:
        """The parts of these that have not been asked for within `timeout_s`; from now on they have."""
        now, target = time.monotonic(), (copies.target, books.incarnations.get(copies.target))
        recent = {key: at for key, at in self._at.items() if now - at < timeout_s and key[0] in books.entries}
        keys = {part: (copies.generation, copies.source, *target, part) for part in copies.parts}
        parts = tuple(part for part, key in keys.items() if key not in recent)
        self._at = recent | {keys[part]: now for part in parts}
        return replace(copies, parts=parts)
