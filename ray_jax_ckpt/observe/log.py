"""The log of processes that this package starts: Ray sends what they print to the driver."""

from __future__ import annotations

import logging


def show_log() -> None:
    """Prints this package's log from INFO on, unless the process has set it up otherwise. Idempotent."""
    ours = logging.getLogger("ray_jax_ckpt")
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
