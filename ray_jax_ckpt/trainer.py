"""`JaxConfig`: how `ray.train.v2.jax.JaxTrainer` sets JAX up on its workers."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ray.train.v2.jax.config import JaxConfig as RayJaxConfig

from ray_jax_ckpt._backend import JaxBackend
from ray_jax_ckpt.errors import ConfigError

_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


@dataclasses.dataclass(kw_only=True)
class JaxConfig(RayJaxConfig):
    """Ray's JaxConfig for runs that are expected to fail and to be restarted. Give it to `JaxTrainer(jax_config=...)`.

    * Several workers always form one JAX program, on CPU too. A single one needs no coordination, except on TPU, where
      everything is set up by Ray's own code.
    * A worker uses the GPUs that Ray assigned to it, also when several workers share a node.
    * After a failure nobody waits for dead peers: the survivors are killed at once.
    * A worker that dies, or cannot be reached, while JAX starts costs a new start of the group, never the run, nor the
      resources the group had reserved.
    * Compiled programs outlive the processes, so that a restarted worker need not compile.

    How soon the controller notices a death is Ray's RAY_TRAIN_HEALTH_CHECK_INTERVAL_S (2 s by default, read where
    `fit()` is called). It is left alone here: it also is the pace at which reports are taken, and polls cost the
    controller time in proportion to the number of workers.

    Attributes:
        platform: "cpu", "cuda" (or "gpu"), "tpu", or another platform that JAX knows. None takes what ScalingConfig
            says (`use_tpu`, `use_gpu`), else what JAX_PLATFORMS is on the workers, else "cpu". What is said here, or by
            ScalingConfig, counts against a JAX_PLATFORMS that excludes it; one that only adds to it ("cuda,cpu") stays.
            `use_tpu` and `use_gpu`, inherited from Ray's, count only where JAX_PLATFORMS is unset, as they do there.
        compilation_cache_dir: Where compiled programs are kept, as a path on the workers. None: where the user
            configured a cache (JAX_COMPILATION_CACHE_DIR, `jax.config`), that one, else `~/.cache/ray_jax_ckpt`
            (XDG_CACHE_HOME) on each node, at most 8 GiB; but none for GPU workers on several nodes, which need a shared
            directory. "": left as it is. A directory that all nodes share also helps a spare node. Whoever can write it
            can run code in the workers.
        initialization_timeout_s: How long the processes wait for each other at the start. Not on TPU.
        heartbeat_timeout_s: How long a process may be silent before JAX ends the others. Ray usually notices first. It
            bounds how long a collective can hang on a peer that froze. With `FailureConfig(preemption_grace_s=...)` it
            is at least two minutes longer than that, so that the survivors do have their grace. Not on TPU.
        shutdown_timeout_s: How long the processes may take to leave each other after a good end.
    """

    platform: str | None = None
    compilation_cache_dir: str | None = None
    initialization_timeout_s: int = 300
    heartbeat_timeout_s: int = 100
    shutdown_timeout_s: int = 30

    def __post_init__(self) -> None:
        self.platform = _checked_platform(self.platform)
        self.compilation_cache_dir = _checked_directory(self.compilation_cache_dir)
        for name in ("initialization_timeout_s", "heartbeat_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"JaxConfig({name}=...) takes whole seconds, at least 1: got {value!r}")

    @property
    def backend_cls(self) -> type[JaxBackend]:
        """What Ray Train calls when a worker group starts and stops."""
        return JaxBackend

    def to_dict(self) -> dict[str, Any]:
        """What Ray's state export and dashboard show."""
        return dataclasses.asdict(self)


def _checked_platform(platform: str | None) -> str | None:
    if platform is None:
        return None
    name = platform.strip().lower() if isinstance(platform, str) else ""
    # A platform of a plugin has any name; one that begins like a known one is misspelt.
    misspelt = name not in _PLATFORMS and name.startswith(_PLATFORMS)
    if not name or "," in name or misspelt:
        raise ConfigError(
            f"JaxConfig(platform=...) takes one platform, 'cpu', 'cuda', 'tpu' or another one's name: got {platform!r}"
        )
    return "cuda" if name == "gpu" else name


def _checked_directory(directory: str | os.PathLike[str] | None) -> str | None:
    """Absolute, or a URL: workers have working directories of their own, which end with them."""
    if not directory:
        return None if directory is None else ""
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else ""
    if not path or not (path.startswith(("/", "~")) or "://" in path):
        raise ConfigError(
            f"JaxConfig(compilation_cache_dir={directory!r}) has to be an absolute path or a URL: workers do not run "
            f"in the driver's working directory. Give {os.path.abspath(path)!r} if it is the same there."
        )
    return os.path.expanduser(path) if path.startswith("~") else path
