"""What the controller does when a worker group starts and stops, on stand-ins for Ray's groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ray_jax_ckpt import _backend, _jax_process
from ray_jax_ckpt._backend import JaxBackend, wanted_platform
from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.trainer import JaxConfig


class Group:
    """A worker group whose workers answer at once."""

    def __init__(self, *, platforms=("cpu",), finished=True, errors=None, use_gpu=False, use_tpu=False):
        self.platforms = list(platforms)
        self.called = []
        self._train_run_context = SimpleNamespace(scaling_config=SimpleNamespace(use_gpu=use_gpu, use_tpu=use_tpu))
        self._worker_group_state = object()
        self.status = SimpleNamespace(finished=finished, errors=errors or {})

    def __len__(self):
        return len(self.platforms)

    def get_workers(self):
        return [SimpleNamespace(metadata=SimpleNamespace(node_id=f"node{i}")) for i in range(len(self))]

    def get_latest_poll_status(self):
        return self.status

    def execute(self, fn, *args):
        self.called.append((fn, *args))
        return self.platforms

    def execute_async(self, fn, *args):
        self.called.append((fn, *args))
        return []


@pytest.mark.parametrize(
    ("config", "scaling", "expected"),
    [
        ({}, {}, (None, False)),
        ({}, {"use_gpu": True}, ("cuda", True)),
        ({}, {"use_tpu": True}, ("tpu", True)),
        ({"use_gpu": True}, {}, ("cuda", False)),
        ({"platform": "cpu"}, {"use_gpu": True}, ("cpu", True)),
    ],
)
def test_the_platform_is_asked_of_the_config_then_of_the_scaling_config(config, scaling, expected):
    assert wanted_platform(JaxConfig(**config), SimpleNamespace(**scaling)) == expected


def test_a_single_worker_joins_nobody():
    group = Group()
    JaxBackend().on_start(group, JaxConfig())
    assert [call[0] for call in group.called] == [_jax_process.prepare]


def test_workers_are_told_what_to_run_on_and_how_far_they_are_spread(monkeypatch):
    group = Group(platforms=["tpu", "tpu"], use_tpu=True)
    rays_own = SimpleNamespace(on_start=lambda *args: group.called.append(args))
    monkeypatch.setattr(_backend, "RayJaxBackend", lambda: rays_own)
    JaxBackend().on_start(group, JaxConfig(compilation_cache_dir="/x"))
    (prepare, told), (given_group, ray_config), settled = group.called
    assert (prepare, *settled) == (_jax_process.prepare, _jax_process.settle, "tpu")
    assert told == _jax_process.ProcessConfig("tpu", True, 2, "/x")
    assert given_group is group
    assert ray_config.use_tpu


def test_workers_that_disagree_about_the_platform_end_the_start_and_leave_nothing_behind():
    group = Group(platforms=["cpu", "tpu"])
    with pytest.raises(ConfigError, match=r"by rank: \['cpu', 'tpu'\]"):
        JaxBackend().on_start(group, JaxConfig())
    assert group._worker_group_state is None


def test_a_good_end_is_orderly(monkeypatch):
    waited_s = []
    monkeypatch.setattr(_backend.ray, "get", lambda refs, timeout: waited_s.append(timeout))
    group = Group()
    JaxBackend().on_shutdown(group, JaxConfig())
    assert [call[0] for call in group.called] == [_jax_process.leave]
    assert waited_s == [30]


@pytest.mark.parametrize("ending", [{"errors": {1: RuntimeError()}}, {"finished": False}])
def test_nobody_waits_after_a_failure_or_in_the_middle(ending):
    group = Group(**ending)
    JaxBackend().on_shutdown(group, JaxConfig())
    assert group.called == []


def test_shutdown_never_raises():
    JaxBackend().on_shutdown(object(), JaxConfig())
