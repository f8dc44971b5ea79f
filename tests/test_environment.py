"""Settings from environment variables, and what is said of those that cannot work."""

from __future__ import annotations

import pytest
from ray.train import RunConfig
from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks  # noqa: TID251

import ray_jax_ckpt as rjc
from ray_jax_ckpt.environment import is_enabled, read_settings
from ray_jax_ckpt.errors import ConfigError


def test_every_setting_has_a_variable():
    found = read_settings(
        {
            "RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS": "25",
            "RAY_JAX_CKPT_SNAPSHOT_VERIFY": "false",
            "RAY_JAX_CKPT_SNAPSHOT_SCRUB_INTERVAL_S": "none",
            "RAY_JAX_CKPT_SNAPSHOT_STAGING": "device",
            "RAY_JAX_CKPT_SNAPSHOT_TLS": '{"certificate": "/c", "private_key": "/k", "ca": "/a"}',
            "RAY_JAX_CKPT_PERSIST_EVERY_S": "1.5",
            "RAY_JAX_CKPT_RESUME_FROM": "s3://bucket/x",
            "RAY_JAX_CKPT_ENABLED": "1",
            "PATH": "/bin",
        }
    )
    tls = rjc.TlsConfig(certificate="/c", private_key="/k", ca="/a")
    wanted = {"every_n_steps": 25, "verify": False, "scrub_interval_s": None, "staging": "device", "tls": tls}
    assert found.snapshot == rjc.SnapshotConfig(**wanted)
    assert found.persist == rjc.PersistConfig(every_s=1.5)
    assert (found.resume, found.resume_from) == ("auto", "s3://bucket/x")


def test_nothing_is_persisted_that_nobody_asks_for():
    found = read_settings({"RAY_JAX_CKPT_PERSIST_EVERY_S": "", "RAY_JAX_CKPT_RESUME": "must"})
    assert (found.snapshot, found.persist, found.resume) == (rjc.SnapshotConfig(), None, "must")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SNAPSHOT_EVERY_N_STEPS", "often", r"RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS='often'.*every_n_steps"),
        ("SNAPSHOT_COPIES", "0", r"RAY_JAX_CKPT_SNAPSHOT_COPIES='0'.*greater than or equal to 1"),
        ("PERSIST_EVERY_N_STEP", "3", r"PERSIST_EVERY_N_STEP is no setting; did you mean .*PERSIST_EVERY_N_STEPS\?"),
        ("SNAPSHOT_TLS", "{", r"RAY_JAX_CKPT_SNAPSHOT_TLS='\{'"),
        ("EVERY_N_STEPS", "3", r"EVERY_N_STEPS is no setting; did you mean RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS\?"),
        ("EVERY_S", "3", r"EVERY_S is no setting; did you mean RAY_JAX_CKPT_PERSIST_EVERY_S\?"),
        ("RESUME", "allways", r"RAY_JAX_CKPT_RESUME='allways': say one of 'auto', 'never', 'must'\."),
        ("XYZZY", "3", r"XYZZY is no setting; there are RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS, "),
    ],
)
def test_a_variable_that_cannot_work_is_named(name, value, said):
    with pytest.raises(ConfigError, match=said):
        read_settings({f"RAY_JAX_CKPT_{name}": value})


def test_the_whole_package_can_be_switched_off():
    assert is_enabled({})
    assert is_enabled({"RAY_JAX_CKPT_ENABLED": "yes"})
    assert not is_enabled({"RAY_JAX_CKPT_ENABLED": "0"})
    assert not is_enabled({"RAY_JAX_CKPT_ENABLED": "False"})
    with pytest.raises(ConfigError, match="RAY_JAX_CKPT_ENABLED='perhaps': say 1 or 0"):
        is_enabled({"RAY_JAX_CKPT_ENABLED": "perhaps"})


def test_ray_makes_a_manager_of_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_jax_ckpt.EnvCheckpointManager")
    monkeypatch.setenv("RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS", "7")
    monkeypatch.setenv("RAY_JAX_CKPT_RESUME", "never")
    (manager,) = _initialize_env_callbacks()
    assert isinstance(manager, rjc.CheckpointManager)
    assert (manager._config.every_n_steps, manager._resume.mode) == (7, "never")
    monkeypatch.setenv("RAY_JAX_CKPT_RESUME", "perhaps")
    with pytest.raises(ValueError, match="Failed to import callback") as caught:
        _initialize_env_callbacks()
    assert "RAY_JAX_CKPT_RESUME='perhaps': say one of 'auto', 'never', 'must'" in str(caught.value.__cause__)
    # Ray's own settings take it as a callback too.
    assert RunConfig(callbacks=[rjc.CheckpointManager()]).callbacks
