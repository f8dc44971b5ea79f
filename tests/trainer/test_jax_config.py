"""What a user sets on JaxConfig, and what importing it costs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from ray.train.v2._internal.util import TrainingFramework  # noqa: TID251
from ray.train.v2.jax import JaxConfig as RayJaxConfig

from ray_jax_ckpt._backend import JaxBackend
from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.trainer import JaxConfig


def test_importing_it_does_not_import_jax():
    code = "import sys, ray_jax_ckpt.trainer as t; t.JaxConfig().to_dict(); print({'jax', 'jaxlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"


def test_it_is_what_ray_takes_for_a_jax_config():
    config = JaxConfig()
    assert isinstance(config, RayJaxConfig)
    assert config.backend_cls is JaxBackend
    assert config.framework is TrainingFramework.JAX


def test_it_pickles_and_lists_all_its_settings():
    config = JaxConfig(platform="tpu", compilation_cache_dir="gs://bucket/xla", heartbeat_timeout_s=60)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.to_dict() == {
        "use_tpu": False,
        "use_gpu": False,
        "platform": "tpu",
        "compilation_cache_dir": "gs://bucket/xla",
        "initialization_timeout_s": 300,
        "heartbeat_timeout_s": 60,
        "shutdown_timeout_s": 30,
    }


@pytest.mark.parametrize(("given", "kept"), [("GPU", "cuda"), (" CPU ", "cpu"), ("rocm", "rocm"), (None, None)])
def test_platform_names_are_normalized(given, kept):
    assert JaxConfig(platform=given).platform == kept


@pytest.mark.parametrize("platform", ["", "cuda,cpu", 3, "cuda9", "gpus"])
def test_a_platform_that_is_none_is_refused(platform):
    with pytest.raises(ConfigError, match="takes one platform"):
        JaxConfig(platform=platform)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("name", ["initialization_timeout_s", "heartbeat_timeout_s", "shutdown_timeout_s"])
def test_timeouts_are_whole_positive_seconds(name, value):
    with pytest.raises(ConfigError, match=name):
        JaxConfig(**{name: value})


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, None), ("", ""), ("/abs/dir", "/abs/dir"), ("gs://bucket/dir", "gs://bucket/dir"), (Path("/abs"), "/abs")],
)
def test_a_cache_directory_is_absolute(given, kept):
    assert JaxConfig(compilation_cache_dir=given).compilation_cache_dir == kept
    assert os.path.isabs(JaxConfig(compilation_cache_dir="~/xla").compilation_cache_dir)


@pytest.mark.parametrize("directory", ["xla", "./xla", "../xla", Path("xla"), 3])
def test_a_cache_directory_that_depends_on_the_process_is_refused(directory):
    with pytest.raises(ConfigError, match=r"compilation_cache_dir=.*absolute path or a URL.*working directory"):
        JaxConfig(compilation_cache_dir=directory)
