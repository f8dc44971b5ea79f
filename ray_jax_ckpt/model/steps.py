"""What a training step may be."""

from __future__ import annotations

import operator
from typing import Any

from ray_jax_ckpt.errors import StepError


def checked_step(step: Any, last: int | None) -> int:
    """A step as an int.

    Args:
        step: What the user gave.
        last: The step before it in the same line of steps; None: there is none.

    Raises:
        StepError: It is no int, negative, or goes back.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise StepError(f"step must be an int, got {step!r} of type {type(step).__name__}. Pass int(step).")
    if number < 0:
        raise StepError(f"step must not be negative, got {number}.")
    if last is not None and number < last:
        raise StepError(
            f"Step {number} comes after step {last} in the same attempt. Going back needs restore(), "
            "which starts a new line; otherwise steps must grow."
        )
    return number
