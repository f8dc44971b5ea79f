"""Environment of the whole test session. It must be set before anything imports jax or starts Ray."""

from __future__ import annotations

import os
from typing import Any

import pytest

_DEVICES = "--xla_force_host_platform_device_count"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

# Ray's own reports, banners and folding of equal lines would hide what a failed test printed.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


# Directories whose tests use Ray clusters.
_CLUSTERS = ("cases", "faults", "integration", "memory", "persist", "trainer", "worker")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes (`-n`): one of them has all tests with Ray clusters, which wait more than they work.

    Two clusters at a time would slow each other down beyond what their tests wait for. The other processes take the
    rest file by file. (`--dist loadgroup` would be the way, but xdist 3.8 loses its groups with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "clusters" if path.split("/")[1] in _CLUSTERS else path

    return Lanes(config, log)
