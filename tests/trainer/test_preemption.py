"""What Ray's poll says of preempted and of dead ranks, and how long JAX waits for silent peers in a preemption."""

from __future__ import annotations

import types

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError  # noqa: TID251
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus  # noqa: TID251
from ray.train.v2.api.preemption import PreemptionInfo

from ray_jax_ckpt import _backend, _ray_compat
from ray_jax_ckpt.trainer import JaxConfig


def poll(**changes) -> WorkerGroupPollStatus:
    return WorkerGroupPollStatus({0: WorkerStatus(True), 1: WorkerStatus(True, **changes)})


def test_preempted_ranks_and_the_deadline_come_with_the_poll():
    assert _ray_compat.preemption_of(poll()) is None
    assert _ray_compat.preemption_of(poll(preemption_info=PreemptionInfo(99_000, {"n": [1]}))) == ((1,), 99_000)
    assert _ray_compat.preemption_of(poll(preemption_info=PreemptionInfo(None, {"n": [0, 1]}))) == ((0, 1), 0)


def test_a_rank_whose_train_function_raised_still_has_its_process():
    assert _ray_compat.dead_ranks(poll(error=ValueError("the user's"))) == []
    assert _ray_compat.dead_ranks(poll(error=WorkerHealthCheckFailedError("gone", failure=ActorDiedError()))) == [1]


@pytest.mark.parametrize(("grace_s", "expected"), [(0.0, 100), (2.5, 123), (300.0, 420)])
def test_jax_waits_for_silent_peers_beyond_the_grace_of_a_preemption(grace_s, expected):
    failures = types.SimpleNamespace(preemption_grace_s=grace_s)
    context = types.SimpleNamespace(run_config=types.SimpleNamespace(failure_config=failures))
    group = types.SimpleNamespace(_train_run_context=context)
    assert _backend._heartbeat_timeout_s(group, JaxConfig()) == expected
    assert _backend._heartbeat_timeout_s(types.SimpleNamespace(), JaxConfig(heartbeat_timeout_s=60)) == 60


def test_what_a_group_crashed_with_is_told_but_not_of_ranks_that_went_with_their_node():
    def died(said):
        context = ActorDiedErrorContext(error_message=said, actor_id=bytes(16))
        return WorkerHealthCheckFailedError("gone", failure=ActorDiedError(context))

    # As Ray 2.60's GCS words them.
    node = died("The actor died because its node has died. Node Id: 12")
    process = died("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR")
    assert _ray_compat.crash_of(poll(error=node)) == ()
    assert _ray_compat.crash_of(poll(error=process)) == ("its process died",)
    assert _ray_compat.crash_of(poll(error=ValueError("loss 3.5 is nan\nat"))) == ("ValueError: loss #.# is nan",)
