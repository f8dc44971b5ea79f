"""Checkpoints for JAX on Ray Train that survive dead workers and dead nodes from memory.

``import ray_jax_ckpt as rjc`` is cheap: a public name loads its module when it is first used. A driver that only
configures a run must not import jax, since jax on a TPU host would lock the chips away from the workers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_jax_ckpt import errors
    from ray_jax_ckpt.arrays.snapshotter import Snapshotter
    from ray_jax_ckpt.config import PersistConfig, SnapshotConfig, TlsConfig
    from ray_jax_ckpt.handler import OrbaxCheckpointHandler
    from ray_jax_ckpt.listing import CheckpointInfo, checkpoints, rebuild_ray_state, remove_unfinished
    from ray_jax_ckpt.manager import CheckpointManager, EnvCheckpointManager
    from ray_jax_ckpt.metrics import to_metrics
    from ray_jax_ckpt.registry import Registry
    from ray_jax_ckpt.restored import Restored
    from ray_jax_ckpt.trainer import JaxConfig
    from ray_jax_ckpt.worker import latest, restore, snapshot, wait

__version__ = "0.1.0"

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "EnvCheckpointManager",
    "JaxConfig",
    "OrbaxCheckpointHandler",
    "PersistConfig",
    "Registry",
    "Restored",
    "SnapshotConfig",
    "Snapshotter",
    "TlsConfig",
    "__version__",
    "checkpoints",
    "errors",
    "latest",
    "rebuild_ray_state",
    "remove_unfinished",
    "restore",
    "snapshot",
    "to_metrics",
    "wait",
]

_HOME = {
    "CheckpointInfo": "ray_jax_ckpt.listing",
    "CheckpointManager": "ray_jax_ckpt.manager",
    "EnvCheckpointManager": "ray_jax_ckpt.manager",
    "JaxConfig": "ray_jax_ckpt.trainer",
    "OrbaxCheckpointHandler": "ray_jax_ckpt.handler",
    "PersistConfig": "ray_jax_ckpt.config",
    "Registry": "ray_jax_ckpt.registry",
    "Restored": "ray_jax_ckpt.restored",
    "SnapshotConfig": "ray_jax_ckpt.config",
    "Snapshotter": "ray_jax_ckpt.arrays.snapshotter",
    "TlsConfig": "ray_jax_ckpt.config",
    "checkpoints": "ray_jax_ckpt.listing",
    "latest": "ray_jax_ckpt.worker",
    "rebuild_ray_state": "ray_jax_ckpt.listing",
    "remove_unfinished": "ray_jax_ckpt.listing",
    "restore": "ray_jax_ckpt.worker",
    "snapshot": "ray_jax_ckpt.worker",
    "to_metrics": "ray_jax_ckpt.metrics",
    "wait": "ray_jax_ckpt.worker",
}


def __getattr__(name: str) -> Any:
    """Load the module of a public name when the name is first used."""
    if name == "errors":
        return importlib.import_module("ray_jax_ckpt.errors")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
