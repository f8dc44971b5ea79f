"""When a snapshot is due for storage, and which checkpoints go again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jax_ckpt.config import PersistConfig
from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.model.persistence import Persisted, Progress, is_due, pause_s, superfluous
from ray_jax_ckpt.model.shards import Generation


def generation(step: int, attempt: int = 1) -> Generation:
    return Generation(attempt, 0, step)


def due(config: PersistConfig, step: int, last: int | None, *, elapsed_s: float = 0.0, attempt: int = 1) -> bool:
    progress = Progress(None if last is None else generation(last), 100.0)
    return is_due(config, generation(step, attempt), progress, 100.0 + elapsed_s)


def test_steps_count_from_the_last_one_that_was_due():
    config = PersistConfig(every_n_steps=10)
    assert [step for step in range(1, 31) if due(config, step, step - 1)] == [10, 20, 30]
    # Snapshots at every third step: the first one at or after each multiple.
    found = []
    for step in range(3, 40, 3):
        if due(config, step, found[-1] if found else None):
            found.append(step)
    assert found == [12, 21, 30]


def test_seconds_count_from_the_last_one_that_was_due():
    config = PersistConfig(every_s=60)
    assert not due(config, 5, 4, elapsed_s=59)
    assert due(config, 5, 4, elapsed_s=60)
    assert not due(config, 4, 4, elapsed_s=600)


def test_steps_below_the_last_one_are_due_again_after_a_rollback():
    config = PersistConfig(every_n_steps=10)
    assert due(config, 90, 100, attempt=2)
    assert not due(config, 95, 100, attempt=2)
    assert not due(config, 90, 100)


def test_nothing_is_due_without_a_cadence():
    config = PersistConfig()
    assert not config.has_cadence
    assert not any(due(config, step, None, elapsed_s=1e6) for step in (1, 10, 1000))


def persisted(*scores: tuple[int, float | None]) -> list[Persisted]:
    return [Persisted(generation(step), {} if s is None else {"loss": s}) for step, s in scores]


def steps(found: list[Persisted]) -> list[int]:
    return [one.generation.step for one in found]


def test_without_a_score_the_oldest_go():
    found = persisted((10, None), (20, None), (30, None), (40, None))
    assert steps(superfluous(PersistConfig(num_to_keep=2), found)) == [10, 20]
    assert superfluous(PersistConfig(), found) == []


@pytest.mark.parametrize(("order", "gone"), [("min", [10, 30]), ("max", [20, 30])])
def test_the_best_stay_and_the_newest(order, gone):
    found = persisted((10, 5.0), (20, 1.0), (30, math.nan), (40, 3.0), (50, None))
    config = PersistConfig(num_to_keep=2, score_attribute="loss", score_order=order)
    assert steps(superfluous(config, found)) == gone


def test_milestones_stay_and_do_not_count():
    found = persisted((90, None), (100, None), (110, None), (120, None), (200, None), (210, None))
    assert steps(superfluous(PersistConfig(num_to_keep=1, keep_every_n_steps=100), found)) == [90, 110, 120]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.one_of(st.none(), st.floats())), unique_by=lambda pair: pair[0]),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.sampled_from([None, "loss"]),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_the_newest_always_stays_and_no_more_go_than_must(scores, keep, order, attribute, every):
    found = persisted(*scores)
    config = PersistConfig(num_to_keep=keep, score_order=order, score_attribute=attribute, keep_every_n_steps=every)
    gone = superfluous(config, found)
    left = [one for one in found if one not in gone]
    assert not found or max(steps(found)) in steps(left)
    counted = [one for one in left if every is None or one.generation.step % every]
    assert len(counted) <= keep + 1
    assert not gone or len(counted) >= keep
    # What is left decides the same again.
    assert superfluous(config, left) == []


def test_what_the_present_attempt_restores_stays_until_the_attempt_has_one_of_its_own():
    config = PersistConfig(num_to_keep=1)
    # Step 12 came after 10, and attempts crashed with it: the third one restores 10 while 12 is still being written.
    found = persisted((10, None), (12, None))
    assert steps(superfluous(config, found)) == [10]
    assert superfluous(config, found, generation(10), 3) == []
    found.append(Persisted(generation(11, attempt=3)))
    assert steps(superfluous(config, found, generation(10), 3)) == [10, 12]


def test_pauses_grow_unless_the_run_is_ending():
    assert [pause_s(n) for n in (1, 2, 3, 100)] == [2.0, 4.0, 8.0, 300.0]
    assert pause_s(100, ending=True) == 2.0


def test_settings_that_cannot_work_are_refused():
    for name in ("every_n_steps", "every_s", "num_to_keep", "fail_after", "max_concurrent"):
        with pytest.raises(ConfigError, match=rf"PersistConfig\({name}=0\)"):
            PersistConfig(**{name: 0})
    with pytest.raises(ConfigError, match="did you mean every_n_steps"):
        PersistConfig(every_n_step=10)
