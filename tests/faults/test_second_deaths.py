"""A store that dies when its coordinator has been started again and knows the group from the stores alone."""

from __future__ import annotations

import pytest

from faults.test_phases import finish, start
from ray_jax_ckpt.testing import kill_process

pytestmark = pytest.mark.timeout(240)


def test_a_store_killed_after_the_coordinator_was_is_replaced_in_the_same_attempt(crew):
    start(crew)
    kill_process(crew.live.coordinator())
    crew.protect(crew.steps())
    kill_process(crew.store_pid(1))
    later = crew.recover()
    assert crew.begin() == later
    finish(crew, later)
