from __future__ import annotations

import json

import numpy as np
import pytest
from gpt.data import TextBatches, load_text


def batches(**arguments: int) -> TextBatches:
    text = np.random.default_rng(7).integers(0, 256, 2000, dtype=np.uint8)
    return TextBatches(text, **{"batch_size": 3, "length": 8, "seed": 1, **arguments})


def test_text_is_long_and_english() -> None:
    text = load_text()
    assert len(text) > 300_000
    assert b"the" in text.tobytes()


@pytest.mark.parametrize("num_before", [0, 1, 5, 200])  # 200: some epochs later
def test_state_restores_the_same_batches(num_before: int) -> None:
    original, other = batches(), batches()
    for _ in range(num_before):
        next(original)
    other.set_state(json.loads(json.dumps(original.get_state())))
    for _ in range(200):
        np.testing.assert_array_equal(next(original), next(other))


def test_state_is_a_value_not_a_view() -> None:
    original = batches()
    state = original.get_state()
    expected = [next(original) for _ in range(5)]
    original.set_state(state)
    np.testing.assert_array_equal([next(original) for _ in range(5)], expected)


@pytest.mark.parametrize("lost", ["position", "epoch", "rng", "rng_at_epoch_start"])
def test_every_part_of_the_state_matters(lost: str) -> None:
    original, fresh, other = batches(), batches().get_state(), batches()
    for _ in range(100):
        next(original)
    other.set_state({**original.get_state(), lost: fresh[lost]})
    same = all(np.array_equal(next(original), next(other)) for _ in range(100))
    assert not same or lost == "epoch"  # the epoch only counts


def test_ranks_read_different_windows_of_the_right_size() -> None:
    first, second = batches(rank=0, num_ranks=2), batches(rank=1, num_ranks=2)
    assert next(first).shape == (3, 9)
    assert next(first).dtype == np.int32
    assert not np.array_equal(next(first), next(second))


def test_last_token_of_a_row_is_the_next_byte_of_the_text() -> None:
    text = np.arange(256, dtype=np.uint8).repeat(1)
    row = next(TextBatches(text, batch_size=1, length=8))[0]
    np.testing.assert_array_equal(np.diff(row), 1)


def test_too_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        TextBatches(np.zeros(20, np.uint8), batch_size=3, length=8)
