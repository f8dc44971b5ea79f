"""What a worker process decides about platform and devices."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import pytest

from ray_jax_ckpt import _jax_process
from ray_jax_ckpt._jax_process import Coordination, ProcessConfig, cuda_devices, jax_platforms, main_platform
from ray_jax_ckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("wanted", "overrides", "environment", "result"),
    [
        (None, False, "", "cpu"),
        (None, False, "tpu,cpu", "tpu,cpu"),
        ("cuda", True, "", "cuda"),
        ("cuda", True, "cuda,cpu", "cuda,cpu"),
        ("cuda", True, "GPU", "gpu"),
        ("cuda", True, "cpu", "cuda"),
        ("cuda", False, "cpu", "cpu"),
        ("cpu", True, "cuda", "cpu"),
        ("tpu", False, "", "tpu"),
    ],
)
def test_platforms_follow_the_wish_unless_the_environment_allows_more(wanted, overrides, environment, result):
    assert jax_platforms(wanted, overrides=overrides, environment=environment) == result


@pytest.mark.parametrize(("platforms", "main"), [("gpu,cpu", "cuda"), ("cpu,cuda", "cpu"), ("tpu", "tpu")])
def test_the_main_platform_is_the_first(platforms, main):
    assert main_platform(platforms) == main


@pytest.mark.parametrize(
    ("visible", "assigned", "mask", "local"),
    [
        pytest.param("2,5", ["2", "5"], None, [0, 1], id="Ray's mask is kept, JAX counts inside it"),
        pytest.param("3", ["3"], None, [0], id="a second worker keeps its own GPU"),
        pytest.param("1", ["1"], None, [0], id="a fraction of a GPU"),
        pytest.param(None, ["2", "5"], "2,5", [0, 1], id="no mask: Ray's assignment becomes one"),
        pytest.param("4,5,6,7", ["6"], None, [2], id="a mask of the whole node is narrowed"),
        pytest.param("MIG-a,MIG-b", ["MIG-b"], None, [1], id="names instead of numbers"),
        pytest.param("GPU-aaaa", ["0"], None, [0], id="a mask that does not tell is trusted"),
        pytest.param("0, 1", [], None, [0, 1], id="the user's own mask"),
        pytest.param(None, [], None, None, id="nothing known: all GPUs"),
    ],
)
def test_a_worker_uses_the_gpus_that_ray_assigned(visible, assigned, mask, local):
    assert cuda_devices(visible, assigned) == (mask, local)


@pytest.fixture
def restored_environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("restored_environment")
def test_devices_reach_jax_by_the_environment(monkeypatch):
    os.environ.update(CUDA_VISIBLE_DEVICES="2,5", JAX_PLATFORMS="")
    monkeypatch.setattr(_jax_process, "_assigned_gpus", lambda: ["5"])
    monkeypatch.setattr(_jax_process, "settle", lambda platform: None)
    monkeypatch.setattr(_jax_process, "_import_jax", lambda platforms: None)
    config = ProcessConfig(platform="cuda", overrides_environment=True, num_nodes=1, compilation_cache_dir="")
    assert _jax_process.prepare(config) == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert os.environ["JAX_CUDA_VISIBLE_DEVICES"] == "1"
    assert os.environ["JAX_PLATFORMS"] == "cuda"
    assert _jax_process._local_device_ids() == [1]


@pytest.mark.usefixtures("restored_environment")
def test_cuda_without_an_assigned_gpu_is_refused():
    os.environ.update(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cuda")
    config = ProcessConfig(platform=None, overrides_environment=False, num_nodes=1, compilation_cache_dir="")
    with pytest.raises(ConfigError, match="assigned no GPU"):
        _jax_process.prepare(config)


@pytest.mark.usefixtures("restored_environment")
def test_on_tpu_jax_is_left_to_rays_own_setup(monkeypatch):
    os.environ.pop("JAX_PLATFORMS", None)
    # Where JAX is loaded its own settings are changed too, and other tests share this process.
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(_jax_process, "_import_jax", lambda platforms: pytest.fail("imported"))
    config = ProcessConfig(platform="tpu", overrides_environment=True, num_nodes=4, compilation_cache_dir="gs://b/xla")
    assert _jax_process.prepare(config) == "tpu"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "gs://b/xla"


def coordination(port: int, timeout_s: int) -> Coordination:
    return Coordination(f"127.0.0.1:{port}", 2, timeout_s, 100, 30)


def test_a_process_waits_until_the_coordinator_listens():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        threading.Timer(0.2, server.listen).start()
        started = time.monotonic()
        _jax_process._wait_for_coordinator(coordination(server.getsockname()[1], 20))
        assert 0.15 < time.monotonic() - started < 10


def test_waiting_for_the_coordinator_is_bounded():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        _jax_process._wait_for_coordinator(coordination(server.getsockname()[1], 1))
