"""Tells who misspelled the metric that checkpoints are ranked by, which otherwise shows when the best ones are gone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ray_jax_ckpt.model.metrics import locate

PATIENCE = 3
"""So many snapshots may be without it: some metrics are not there at every step."""


class MissingScore:
    """Looks at the metrics of one rank's snapshots, until the score is among them or was missed.

    Args:
        name: Of the metric, `PersistConfig.score_attribute`. None: nothing is missed.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._num_without = name, 0

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warns once, when the first snapshots have all been without it."""
        if self._name is None:
            return
        if locate(metrics, self._name) is not None:
            self._name = None
            return
        self._num_without += 1
        if self._num_without == PATIENCE:
            name, self._name = self._name, None
            given = f"those of step {step} are {', '.join(map(repr, metrics))}" if metrics else "they had none"
            warnings.warn(
                f"Checkpoints are to be ranked by the metric {name!r} (PersistConfig.score_attribute), which none of "
                f"the first {PATIENCE} snapshots had: {given}. Without it they count as the worst. Give it as "
                "snapshot(metrics=...) on rank 0, or name another one.",
                RuntimeWarning,
                stacklevel=3,
            )
