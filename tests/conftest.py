"""Environment of the whole test session. It must be set before anything imports jax or starts Ray."""

from __future__ import annotations

import os

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


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes (`-n`): one of them has all tests with Ray clusters, which wait more than they work.

    Those come first, since they take longest; the other processes take the rest file by file.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group("clusters" if _has_cluster(item) else item.path.stem))
    items.sort(key=lambda item: not _has_cluster(item))


def _has_cluster(item: pytest.Item) -> bool:
    folder = item.path.relative_to(item.config.rootpath).parts[1]
    return folder in ("integration", "trainer") or "cluster" in getattr(item, "fixturenames", ())
