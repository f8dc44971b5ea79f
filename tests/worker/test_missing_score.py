"""A metric to rank by that nobody gives is missed."""

from __future__ import annotations

import warnings

import pytest

from ray_jax_ckpt.missing_score import PATIENCE, MissingScore


def test_a_score_that_is_never_given_is_missed_once_with_what_there_is():
    missing = MissingScore("eval.lost")
    for step in range(1, PATIENCE):
        missing.look(step, {"loss": 1.0})
    with pytest.warns(RuntimeWarning, match=r"'eval.lost'.*step 3 are 'loss', 'eval'\..*rank 0"):
        missing.look(PATIENCE, {"loss": 1.0, "eval": {"loss": 2.0}})
    missing.look(PATIENCE + 1, {"loss": 1.0})


def test_without_any_metrics_that_is_said():
    missing = MissingScore("loss")
    for step in range(1, PATIENCE):
        missing.look(step, {})
    with pytest.warns(RuntimeWarning, match="they had none"):
        missing.look(PATIENCE, {})


@pytest.mark.parametrize("name", [None, "loss", "eval.loss"])
def test_what_is_given_now_and_then_or_not_asked_for_is_not_missed(name):
    missing = MissingScore(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        missing.look(0, {})
        missing.look(1, {"loss": 1.0, "eval": {"loss": float("nan")}})
        for step in range(2, 9):
            missing.look(step, {})
