"""Where compiled programs are kept between processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ray_jax_ckpt import _compilation_cache as cache

OPTIONS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@pytest.fixture
def unconfigured(monkeypatch, tmp_path):
    """A process that has not imported JAX, of a user without a cache."""
    for name in OPTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jax", None)
    yield tmp_path
    for name in OPTIONS:
        os.environ.pop(name, None)


def test_the_default_is_private_to_the_user_and_to_the_kind_of_machine(unconfigured):
    directory = cache.configure(None, platform="cpu", num_nodes=3)
    assert directory is not None
    assert Path(directory).parent == unconfigured / "ray_jax_ckpt"
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == directory
    assert float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) == 0


def test_a_cache_that_the_user_configured_is_left_alone(unconfigured, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/theirs")
    assert cache.configure(None, platform="cpu", num_nodes=1) is None
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/theirs"
    assert "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ


def test_a_threshold_that_the_user_set_is_kept(unconfigured, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    assert cache.configure("/shared/xla", platform="cuda", num_nodes=2) == "/shared/xla"
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "5"


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize(("asked", "platform", "num_nodes"), [("", "cpu", 1), (None, "cuda", 2)])
def test_off_where_asked_or_where_gpu_nodes_would_differ(asked, platform, num_nodes):
    assert cache.configure(asked, platform=platform, num_nodes=num_nodes) is None
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_directory_that_others_can_write_is_not_used(unconfigured, caplog):
    directory = cache.default_directory(os.environ)
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert cache.configure(None, platform="cpu", num_nodes=1) is None
    assert "others can write it" in caplog.text


def test_pruning_drops_the_least_recently_used_and_what_killed_writers_left(tmp_path):
    for age, name in enumerate(["new-cache", "middle-cache", "old-cache"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (10_000 - age, 10_000 - age))
    (tmp_path / "x-cache.17-partial").write_bytes(bytes(10))
    os.utime(tmp_path / "x-cache.17-partial", (1, 1))
    (tmp_path / "x-cache.18-partial").write_bytes(bytes(10))
    cache.prune(tmp_path, max_bytes=200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle-cache", "new-cache", "x-cache.18-partial"]


def test_an_entry_is_whole_or_absent(tmp_path, monkeypatch):
    lru_cache = pytest.importorskip("jax._src.lru_cache")
    monkeypatch.setattr(lru_cache.LRUCache, "put", lru_cache.LRUCache.put)  # restored afterwards
    cache.write_entries_atomically()
    cache.write_entries_atomically()
    entries = lru_cache.LRUCache(str(tmp_path), max_size=-1)

    def killed_while_writing(path: Path, value: bytes) -> int:
        with path.open("wb") as file:
            file.write(value[:1])
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killed_while_writing)
        with pytest.raises(OSError, match="disk full"):
            entries.put("key", b"program")
    assert list(tmp_path.iterdir()) == []
    entries.put("key", b"program")
    assert entries.get("key") == b"program"


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize(
    ("directory", "platform", "local_rank", "expected"),
    [
        pytest.param("default", "tpu", 0, True, id="one process fills its node's own directory"),
        pytest.param("default", "tpu", 1, False, id="its neighbours need not"),
        pytest.param("/shared/xla", "tpu", 0, False, id="a shared one is left to process 0"),
        pytest.param("/shared/xla", "cpu", 1, True, id="on CPU the processes have different keys"),
        pytest.param("gs://bucket/xla", "cpu", 0, False, id="object stores are left to process 0"),
        pytest.param("", "cpu", 0, False, id="no cache"),
    ],
)
def test_who_writes(directory, platform, local_rank, expected, monkeypatch):
    default = str(cache.default_directory(os.environ))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", default if directory == "default" else directory)
    assert cache.shall_write(platform=platform, local_rank=local_rank) is expected


PROGRAM = """
import sys
from ray_jax_ckpt import _compilation_cache as cache
assert cache.configure(sys.argv[1], platform="cpu", num_nodes=1)
import jax, jax.numpy as jnp
cache.write_entries_atomically()
jax._src.distributed.global_state.process_id = int(sys.argv[2])
if jax._src.distributed.global_state.process_id:
    cache.write_here()
    cache.write_here()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
print(float(jax.jit(lambda x: (x * 2).sum())(jnp.ones(8))), len(hits))
"""


@pytest.mark.parametrize("process_id", [0, 1])
def test_a_second_process_loads_what_the_first_compiled(tmp_path, process_id):
    def run() -> list[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(process_id)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()

    assert run() == ["16.0", "0"]
    value, hits = run()
    assert value == "16.0"
    assert int(hits) > 0
