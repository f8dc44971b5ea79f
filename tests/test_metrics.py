"""What metrics become on their way into states and manifests."""

from __future__ import annotations

import datetime
import enum
import json
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ray_jax_ckpt import to_metrics
from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.metrics import kept, stored
from ray_jax_ckpt.model.metrics import put_back


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float32(1.5), 1.5),
        (jnp.float32(1.5), 1.5),
        (np.array(1.5), 1.5),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (jnp.bfloat16(1.5), 1.5),
        (ml_dtypes.float8_e4m3fn(1.5), 1.5),
        (np.float16(1.5), 1.5),
        (np.array(7, ">i4"), 7),
        (jnp.int8(7), 7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (jnp.bool_(False), False),
        (np.str_("a"), "a"),
        (Colour.RED, "red"),
        (2**600, 2**600),
        (None, None),
        ((1, [np.int32(2)]), [1, [2]]),
        ({"b": {"c": jnp.float32(3)}}, {"b": {"c": 3.0}}),
    ],
)
def test_scalars_become_python_values(given: Any, expected: Any):
    found = to_metrics({"a": given})["a"]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_stay(value: float):
    for given in (value, np.float32(value), jnp.float32(value)):
        found = to_metrics({"a": given, "b": [given]})
        assert repr(found) == repr({"a": value, "b": [value]})


def _nested() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {"b": np.arange(3)}}, r"metric 'a/b' is an array of shape \(3,\)"),
        ({"a": [1, jnp.ones((1,))]}, r"metric 'a/1' is an array of shape \(1,\)"),
        ({"a": {1, 2}}, "metric 'a' is a set"),
        ({"a": ...}, "metric 'a' is an ellipsis"),
        ({"a": b"x"}, "metric 'a' is a bytes"),
        ({"a": datetime.datetime(2026, 1, 1)}, "metric 'a' is a datetime"),
        ({"a": np.datetime64("2026-01-01")}, "metric 'a' is a scalar of datetime64"),
        ({"a": np.complex64(1)}, "metric 'a' is a scalar of complex64"),
        ({"a": jax.random.key(0)}, "metric 'a' is a scalar of key"),
        ({"a": 1j}, "metric 'a' is a complex"),
        ({"a": 1 << 2000}, "metric 'a' is an integer of 2001 bits"),
        ({"a": "\ud800"}, "metric 'a' holds text that is not Unicode"),
        ({"a": {3: 1}}, "names that are text: got 3 in 'a'"),
        ({3: 1}, "names that are text: got 3"),
        (_nested(), "nested more than 32 deep"),
        ([], "takes a dictionary"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_name(given: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        to_metrics(given)


def test_only_what_has_to_be_fetched_waits():
    array, on_device = np.array(1.0), jnp.float32(2)
    found = stored({"a": array, "b": on_device}, defer=True)
    array[...] = 5.0
    assert found["a"] == 1.0
    assert found["b"] is on_device
    with pytest.raises(ConfigError, match="'b' is an array"):
        stored({"b": jnp.ones(2)}, defer=True)


@pytest.mark.parametrize("value", [math.nan, -math.inf, None, jnp.float32(math.nan)])
@pytest.mark.parametrize("name", ["loss", "eval/loss", "eval.loss"])
def test_a_score_that_ray_cannot_rank_stands_aside(name: str, value: Any):
    given = {"loss": value, "eval": {"loss": value, "acc": 1}}
    found = to_metrics(given, score=name)
    inner = found if name == "loss" else found["eval"]
    assert "loss" not in inner
    assert set(found["rjc_nonfinite"]) == {name}
    # NaN is not equal to itself, and its text is.
    as_text = [json.dumps(metrics, sort_keys=True) for metrics in (put_back(found), to_metrics(given))]
    assert as_text[0] == as_text[1]


def test_a_score_that_ray_can_rank_stays():
    assert to_metrics({"loss": np.float32(2)}, score="loss") == {"loss": 2.0}
    assert to_metrics({"acc": 1}, score="loss") == {"acc": 1}
    for value in ("x", [1], {"a": 1}):
        with pytest.raises(ConfigError, match="must be a number"):
            to_metrics({"loss": value}, score="loss")


def test_where_it_is_too_late_to_refuse_there_is_text(caplog: pytest.LogCaptureFixture):
    found = kept({"loss": 1, "all": np.ones(2), 3: 4})
    assert found == {"loss": 1, "all": "array([1., 1.])", "3": "4"}
    assert "'all' is kept as text" in caplog.text


def test_what_cannot_even_be_shown_is_named_by_its_type():
    found = kept({"huge": 10**5000, "größe": object, "\ud800": 1, "loss": 2.0})
    assert found["huge"] == "int that cannot be shown (ValueError)"
    assert (found["größe"], found["'\\ud800'"], found["loss"]) == ("<class 'object'>", "1", 2.0)


def test_needs_neither_jax_nor_ray():
    code = "import sys, ray_jax_ckpt; ray_jax_ckpt.to_metrics({'a': 1}); print({'jax', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
