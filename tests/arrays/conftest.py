"""A mesh of four CPU devices."""

from __future__ import annotations

import pytest


@pytest.fixture
def mesh():
    """Two replicas of two devices each."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))
