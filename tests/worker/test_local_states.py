"""Workers that do not know each other: every process has JAX to itself, and the same paths and shapes mean its own."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from support import eventually

import ray_jax_ckpt as rjc
from ray_jax_ckpt import session
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint
from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import DataStateError, TreeMismatchError
from ray_jax_ckpt.memory import fleet
from ray_jax_ckpt.memory.messages import Member, RunIdentity
from ray_jax_ckpt.memory.starting import start_coordinator
from ray_jax_ckpt.scratch import make_scratch

TIMEOUT_S = 60


class Worker:
    """A training process; its rank is another one in every attempt."""

    def begin(self, coordinator: Any, config: SnapshotConfig, decision: Any, rank: int) -> None:
        session._current = session.Session(session.Wiring(coordinator, config), decision, rank)

    def leave_files(self) -> str:
        """What is there while an object saves its files."""
        directory = make_scratch()
        (directory / "file").write_text("x")
        return str(directory)

    def snapshot(self, step: int, value: float) -> int:
        rjc.snapshot(step, state_of(value), data={"value": value, "large": b"%d" % value * 5000})
        rjc.wait()
        return jax.process_count()

    def restore(
        self, names: list[str] | None = None, **options: Any
    ) -> tuple[dict[str, Any], Any, dict[int, Any], str]:
        template = {k: v for k, v in state_of(0).items() if names is None or k in names}
        located = session.current().decision.located
        restored = rjc.restore(SnapshotCheckpoint(located.generation), template, partial=names is not None, **options)
        state = jax.tree.map(lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") else x, restored.state)
        return state, restored.data, dict(restored.data_by_rank), restored.source


def state_of(value):
    """Arrays of this process, on its devices and not; "same" is equal on all."""
    return {
        "own": jnp.full(1000, value, jnp.float32),
        "host": np.full(5, value),
        "name": f"{value}",
        "same": jnp.arange(7),
    }


def seen(value):
    return jax.tree.map(lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") else x, state_of(value))


@pytest.fixture(scope="module")
def processes(cluster):
    """Two on different nodes, and a third one beside the first."""
    nodes = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes()]
    # The workers cannot import a test.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    found = [(started(node), node) for node in (nodes[0], nodes[1], nodes[0])]
    yield found
    for actor, _ in found:
        ray.kill(actor)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def started(node):
    where = NodeAffinitySchedulingStrategy(node[0], soft=False)
    actor: Any = ray.remote(Worker).options(num_cpus=0, scheduling_strategy=where)
    return actor.remote()


@pytest.fixture(params=[1, 2])
def group(processes, request):
    """Begins attempts of groups of these processes, in rank order; returns what calls their methods together."""
    config = SnapshotConfig(every_n_steps=1, copies=request.param, timeout_s=30)
    run = f"local{uuid.uuid4().hex[:8]}"
    here = ray.get_runtime_context().get_node_id()
    coordinator = start_coordinator(RunIdentity(run, f"/nowhere/{run}", None), config, here)

    def begin(order):
        chosen = [processes[i] for i in order]
        members = tuple(
            Member(rank, *node, int(i == 2), node[0])
            for rank, (i, (_, node)) in enumerate(zip(order, chosen, strict=True))
        )
        decision = ray.get(coordinator.begin_attempt.remote(members), timeout=TIMEOUT_S)
        ray.get([actor.begin.remote(coordinator, config, decision, r) for r, (actor, _) in enumerate(chosen)])

        def call(method, *arguments, **options):
            refs = [
                getattr(actor, method).remote(*[a[r] for a in arguments], **options)
                for r, (actor, _) in enumerate(chosen)
            ]
            return ray.get(refs, timeout=TIMEOUT_S)

        return call

    yield begin
    ray.kill(coordinator)
    for handle in fleet.living_stores(run).values():
        ray.kill(handle)


def test_each_rank_gets_its_own_back_wherever_it_runs(group):
    call = group([0, 1])
    assert call("snapshot", [1, 1], [10, 11]) == [1, 1]
    # The ranks have changed their nodes.
    found = group([1, 0])("restore")
    assert [state for state, *_ in found] == [seen(10), seen(11)]
    assert [data["value"] for _, data, *_ in found] == [10, 11]
    assert [{r: d["large"] for r, d in by_rank.items()} for _, _, by_rank, _ in found] == [
        {0: b"10" * 5000, 1: b"11" * 5000}
    ] * 2


def test_a_group_of_another_size_gets_only_what_was_equal_everywhere(group):
    group([0, 1])("snapshot", [1, 1], [10, 11])
    call = group([0, 1, 2])
    with pytest.raises(
        TreeMismatchError,
        match=r"Each of 2 processes.*3 processes.*\['host'\] \(rank 1's.*\['name'\].*\['own'\].*data=",
    ) as error:
        call("restore")
    assert "same" not in str(error.value)
    call = group([0, 1, 2])
    with pytest.raises(DataStateError, match=r"saved by 2 processes and cannot be handed to 3.*reshard_state"):
        call("restore", [["same"]] * 3, data=Counter())
    call = group([0, 1, 2])
    found = call("restore", [["same"]] * 3, data=Counter(), reshard_data=total)
    for rank, (state, data, by_rank, _) in enumerate(found):
        assert state == {"same": list(range(7))}
        assert data == {"value": 21 + rank}
        assert {saved_by: d["value"] for saved_by, d in by_rank.items()} == {0: 10, 1: 11}


@pytest.mark.parametrize("group", [1], indirect=True)
def test_files_that_a_killed_process_was_saving_are_removed(group, processes):
    group([0, 2])("snapshot", [1, 1], [10, 11])
    directory = Path(ray.get(processes[2][0].leave_files.remote(), timeout=TIMEOUT_S))
    assert directory.exists()
    ray.kill(processes[2][0])
    eventually(lambda: not directory.exists())


class Counter:
    """Something that takes a state."""

    def set_state(self, state):
        assert state["value"] >= 21


def total(states, *, rank, world_size):
    assert world_size == 3
    return {"value": sum(state["value"] for state in states.values()) + rank}
