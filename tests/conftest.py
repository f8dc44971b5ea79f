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


# A busy test process must not starve the workers of the other one's cluster (Ray gives them 15).
os.environ.setdefault("RAY_worker_niceness", "0")

# Directories whose tests use Ray clusters. Those of the second part start few processes.
_LANES = {
    **dict.fromkeys(("faults", "integration", "memory", "persist"), "clusters"),
    **dict.fromkeys(("cases", "trainer", "worker"), "small clusters"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes (`-n`): one of them has nearly all tests with Ray clusters.

    Two such at a time slow each other down beyond what their tests wait for, on two cores. The rest goes file by file
    to whoever has time. (`--dist loadgroup` would be the way, but xdist 3.8 loses its groups with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return _LANES.get(path.split("/")[1], path)

    return Lanes(config, log)
