"""What a user may set: checked when it is written down, not when a run has been going for hours."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pydantic
import pytest

from ray_jax_ckpt.config import SnapshotConfig


def test_defaults_survive_a_dead_node() -> None:
    config = SnapshotConfig()
    assert config.copies == 2
    assert config.verify


def test_frozen() -> None:
    config = SnapshotConfig()
    with pytest.raises(pydantic.ValidationError, match="Instance is frozen"):
        config.copies = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_misspelt_setting_is_named() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"every_n_step\n.*Extra inputs are not permitted"):
        SnapshotConfig(every_n_step=5)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("every_n_steps", 0, "greater than or equal to 1"),
        ("every_n_steps", 2.5, "valid integer"),
        ("copies", 0, "greater than or equal to 1"),
        ("max_bytes", 0, "greater than 0"),
        ("staging", "pinned", "'host' or 'device'"),
        ("max_bytes", "lots", "valid integer"),
        ("on_busy", "drop", "'wait' or 'skip'"),
        ("timeout_s", 0, "greater than 0"),
        ("timeout_s", -1, "greater than 0"),
        ("timeout_s", float("nan"), "greater than 0|finite"),
        ("orphan_timeout_s", 0, "greater than 0"),
        ("failure_domain", "", "at least 1 character"),
        ("streams", 0, "greater than or equal to 1"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(setting: str, value: Any, why: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=rf"(?s){setting}\n.*({why})"):
        SnapshotConfig(**{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("max_bytes", None), ("max_bytes", 1), ("failure_domain", "rack")])
def test_edges_that_work(setting: str, value: Any) -> None:
    assert getattr(SnapshotConfig(**{setting: value}), setting) == value


def test_pickles_equal() -> None:
    config = SnapshotConfig(every_n_steps=5, max_bytes=1 << 40, on_busy="skip")
    assert pickle.loads(pickle.dumps(config)) == config


def test_docstring_documents_every_field_in_order() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.cleandoc(SnapshotConfig.__doc__ or ""), flags=re.MULTILINE)
    assert documented == list(SnapshotConfig.model_fields)
