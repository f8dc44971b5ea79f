"""What a user may set: checked when it is written down, not when a run has been going for hours."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest

from ray_jax_ckpt import CheckpointManager
from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import ConfigError


def test_defaults_survive_a_dead_node() -> None:
    config = SnapshotConfig()
    assert config.copies == 2
    assert config.verify


def test_frozen() -> None:
    config = SnapshotConfig()
    with pytest.raises(ConfigError, match=r"cannot be changed.*model_copy"):
        config.copies = 3
    assert config.copies == 2


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("every_n_step", "every_n_steps"),
        ("copys", "copies"),
        ("timeout", "timeout_s"),
        ("on_bussy", "on_busy"),
        ("every", "every_n_steps"),
    ],
)
def test_misspelt_setting_is_named_with_the_nearest_one(setting: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"SnapshotConfig has no setting '{setting}'; did you mean {near}\?"):
        SnapshotConfig(**{setting: 5})


def test_a_setting_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"'zzz'; there are every_n_steps, copies, .*failure_domain"):
        SnapshotConfig(zzz=5)
    with pytest.raises(ValueError, match=r"(?s)copies=0.*\n.*'zzz'"):
        SnapshotConfig(copies=0, zzz=5)


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("every_n_steps", 0, "greater than or equal to 1"),
        ("every_n_steps", 2.5, "valid integer"),
        ("every_n_steps", True, "no bool"),
        ("timeout_s", True, "no bool"),
        ("max_bytes", True, "no bool"),
        ("copies", 0, "greater than or equal to 1"),
        ("max_bytes", 0, "greater than 0"),
        ("staging", "pinned", "'host' or 'device'"),
        ("max_bytes", "lots", "valid integer"),
        ("on_busy", "drop", "'wait' or 'skip'"),
        ("timeout_s", 0, "greater than 0"),
        ("timeout_s", -1, "greater than 0"),
        ("timeout_s", float("nan"), "finite"),
        ("timeout_s", float("inf"), "finite"),
        ("every_n_steps", "a", "valid integer"),
        ("orphan_timeout_s", 0, "greater than 0"),
        ("failure_domain", "", "at least 1 character"),
        ("streams", 0, "greater than or equal to 1"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(setting: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^SnapshotConfig\({setting}={re.escape(repr(value))}\): .*({why})"):
        SnapshotConfig(**{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("max_bytes", None), ("max_bytes", 1), ("failure_domain", "rack")])
def test_edges_that_work(setting: str, value: Any) -> None:
    assert getattr(SnapshotConfig(**{setting: value}), setting) == value


def test_a_class_in_place_of_its_settings_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match=r"got the class SnapshotConfig; make one: SnapshotConfig\(\)\."):
        CheckpointManager(SnapshotConfig)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"takes a PersistConfig, got 5 of type int\."):
        CheckpointManager(persist=5)  # pyright: ignore[reportArgumentType]


def test_pickles_equal() -> None:
    config = SnapshotConfig(every_n_steps=5, max_bytes=1 << 40, on_busy="skip")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_copy_with_changes_is_checked() -> None:
    config = SnapshotConfig(copies=3)
    changed = config.model_copy(update={"every_n_steps": 2})
    assert (changed.copies, changed.every_n_steps, config.every_n_steps) == (3, 2, 10)
    with pytest.raises(ConfigError, match=r"copies=0"):
        config.model_copy(update={"copies": 0})


def test_docstring_documents_every_field_in_order() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.cleandoc(SnapshotConfig.__doc__ or ""), flags=re.MULTILINE)
    assert documented == list(SnapshotConfig.model_fields)
