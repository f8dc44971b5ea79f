"""Where XLA keeps compiled programs, so that a restarted worker loads them instead of compiling them again.

Runs in worker processes. What JAX's own cache does, and what follows from it:

* Only process 0 of a group writes, the others just read. A node with a directory of its own and without process 0 never
  finds anything in it; and on CPU no other process ever does, since JAX 0.10 keys programs by a fingerprint of the
  topology that differs from process to process there. See `write_here`.
* On CPU and TPU a process that finds nothing compiles alone. On GPU the processes share out the autotuning of a program
  while they compile it, so one that compiles would wait for those that loaded theirs. Hence no default cache where GPU
  workers sit on several nodes: a directory that all of them see has to be named.
* It writes entries in place and never replaces one. See `write_entries_atomically`.
* Whoever can write the directory can run code in the workers.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform as host
import stat
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MIN_SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MAX_DEFAULT_CACHE_BYTES = 8 << 30
_ENTRY_SUFFIX = "-cache"
_PARTIAL_SUFFIX = "-partial"
_PARTIAL_MAX_AGE_S = 3600.0
_WRITE_PARAMETERS = ("cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks")


def configure(asked: str | None, *, platform: str, num_nodes: int) -> str | None:
    """Point JAX's persistent compilation cache at a directory. Call it before the first compilation.

    Args:
        asked: The directory, "" to leave everything as it is, None for the default: nothing where the user has
            configured a cache, else a directory of this user and this kind of machine.
        platform: What JAX runs on: "cpu", "cuda", "tpu".
        num_nodes: Nodes that hold workers of this group.

    Returns:
        The directory that was set, None where nothing was.
    """
    if asked == "" or (asked is None and _is_configured()):
        return None
    if asked is None and platform == "cuda" and num_nodes > 1:
        logger.info(
            "No default compilation cache: GPU workers on %d nodes need a directory that all of them share. "
            "Name one with JaxConfig(compilation_cache_dir=...).",
            num_nodes,
        )
        return None
    directory = asked if asked is not None else _prepared_default()
    if directory is not None:
        _set("jax_compilation_cache_dir", DIRECTORY_VARIABLE, directory)
        if MIN_SECONDS_VARIABLE not in os.environ:
            # JAX's default skips what compiles in under a second: hundreds of small programs before the first step.
            _set("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS_VARIABLE, 0.0)
    return directory


def _is_configured() -> bool:
    if DIRECTORY_VARIABLE in os.environ:
        return True
    jax = sys.modules.get("jax")
    return jax is not None and jax.config.jax_compilation_cache_dir is not None


def _set(option: str, variable: str, value: str | float) -> None:
    """Set an option for a JAX that is still to be imported, here or in a child process, and for one that is."""
    os.environ[variable] = str(value)
    if (jax := sys.modules.get("jax")) is not None:
        jax.config.update(option, value)


# The default directory


def _prepared_default() -> str | None:
    directory = default_directory(os.environ)
    try:
        _make_private(directory)
        prune(directory, max_bytes=MAX_DEFAULT_CACHE_BYTES)
    except OSError as error:
        logger.warning(
            "No compilation cache: %s cannot be used (%s). Restarted workers compile again. "
            "Name another directory with JaxConfig(compilation_cache_dir=...).",
            directory,
            error,
        )
        return None
    return str(directory)


def default_directory(environ: MutableMapping[str, str]) -> Path:
    """This user's cache directory, one for each kind of machine.

    A home directory may be shared by machines with different CPUs. XLA compiles for the CPU it runs on, and a program
    loaded on a lesser one dies of an illegal instruction.
    """
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ray_jax_ckpt" / f"xla-{host.machine()}-{_cpu_digest()}"


def _cpu_digest() -> str:
    features = b""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        features = next((line for line in lines if line.lower().startswith((b"flags", b"features"))), b"")
    return hashlib.sha256(features).hexdigest()[:12]


def _make_private(directory: Path) -> None:
    """Create the directory, and refuse one that others can write: they could plant programs that our workers run.

    Raises:
        PermissionError: It belongs to, or can be written by, somebody else.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write it (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})")


def prune(directory: Path, *, max_bytes: int) -> None:
    """Remove the least recently used entries beyond `max_bytes`, and what killed writers left behind.

    Several processes may do so at once. One that is about to read an entry removed here compiles instead. JAX's own
    limit (jax_compilation_cache_max_size) is not used: once a process is killed between writing an entry and its time
    stamp, nothing is cached any more.
    """
    entries, now = [], time.time()
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            if path.name.endswith(_PARTIAL_SUFFIX) and now - status.st_mtime > _PARTIAL_MAX_AGE_S:
                path.unlink()
            elif path.name.endswith(_ENTRY_SUFFIX):
                entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in entries) - max_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size


# Writing


def shall_write(*, platform: str, local_rank: int) -> bool:
    """Whether this process shall write programs though it may not be process 0.

    On CPU every process has keys of its own. Elsewhere one process of each node fills the node's default directory. A
    directory that may be shared by many nodes is left to process 0.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    if not directory or "://" in directory:
        return False
    return platform == "cpu" or (local_rank == 0 and directory == str(default_directory(os.environ)))


def write_here() -> None:
    """Make JAX write programs in this process too, whatever its number. Imports JAX; a second call changes nothing."""
    from jax._src import compilation_cache, compiler, config, distributed

    original = getattr(compiler, "_cache_write", None)
    if hasattr(original, "is_everywhere"):
        return
    if original is None or tuple(inspect.signature(original).parameters) != _WRITE_PARAMETERS:
        logger.debug("This JAX writes its compilation cache in another way: only process 0 does.")
        return

    def write(*args: Any) -> None:
        cache_key, compile_time_s, module_name, backend, executable, host_callbacks = args
        if distributed.global_state.process_id == 0:
            original(*args)
        elif not host_callbacks and compile_time_s >= config.persistent_cache_min_compile_time_secs.value:
            with _warning_of_failure(module_name):
                compilation_cache.put_executable_and_time(
                    cache_key, module_name, executable, backend, int(compile_time_s)
                )

    write.is_everywhere = True  # pyright: ignore[reportFunctionMemberAccess]
    compiler._cache_write = write


@contextmanager
def _warning_of_failure(module_name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("The compiled program %s was not cached: %s: %s", module_name, type(error).__name__, error)


def write_entries_atomically() -> None:
    """Make JAX write entries of a local cache aside and rename them. Imports JAX; calling it again changes nothing.

    JAX 0.10 writes in place and never replaces an entry. A worker killed in the middle of it leaves half an entry that
    each later process fails to read, warns about and compiles around; and the other processes of the node, which look
    for the same program at the same moment, may read it half written.
    """
    try:
        from jax._src.lru_cache import LRUCache
    except ImportError:
        logger.debug("This JAX has no LRUCache: its compilation cache is used as it is.")
        return
    original = LRUCache.put
    if getattr(original, "is_atomic", False):
        return

    def put(self: Any, key: str, value: bytes) -> None:
        if not key or self.eviction_enabled or "://" in str(self.path):
            original(self, key, value)
        else:
            _write_entry(Path(str(self.path)) / f"{key}{_ENTRY_SUFFIX}", value)

    put.is_atomic = True  # pyright: ignore[reportFunctionMemberAccess]
    LRUCache.put = put


def _write_entry(path: Path, value: bytes) -> None:
    if path.exists():
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL_SUFFIX}")
    try:
        partial.write_bytes(value)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
