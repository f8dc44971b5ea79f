"""Four CPU devices and strict dtypes, also when only this directory's tests are run."""

from __future__ import annotations

import os
import sys

import pytest

_DEVICES = "--xla_force_host_platform_device_count"

if "jax" not in sys.modules:
    if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"


@pytest.fixture
def mesh():
    """Two replicas of two devices each."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))
