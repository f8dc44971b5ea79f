"""Fault injection, for tests of training code as much as for tests of this package.

What is done here is done for real and at once, as by a machine that loses power: a killed process runs no signal
handler, flushes nothing and tells no peer. It acts on processes of THIS machine, so it fits clusters that a test starts
itself, for example with `ray.cluster_utils.Cluster`, where every "node" is a raylet and its child processes.

* Processes and nodes: `kill_process`, `pause_process`, `resume_process`, `kill_node`, `kill_raylet`, `pause_node`,
  `resume_node`, and `drain_node`, which gives notice of a node that will be taken away.
* A run's stores and coordinator, by the run's name: `find_run`, and from there their process ids and the copies they
  hold, to be damaged.
* Faults at a phase: `FaultPlan` arms a `Fault` at one of `POINTS`.
* `assert_identical` compares a restored state with the expected one to the last bit.

A worker that dies in the middle of copying step 20, and a second failure while step 10 is being restored::

    from ray_jax_ckpt.testing import Fault, FaultPlan, find_run

    with FaultPlan() as plan:
        ray.init()  # or a Cluster; what is started inside the block gets the faults
        first = plan.arm(Fault("copy", "kill", rank=1, step=20))
        second = plan.arm(Fault("read", "kill", rank=0))
        trainer.fit()  # with FailureConfig(max_failures=2) or more
        assert first.fired() and second.fired()

A store that is killed while the training runs (from another thread than `fit`)::

    kill_process(find_run("gpt2-run7", storage_path).stores()[1])
"""

from ray_jax_ckpt.observe.faults import POINTS, Fault, InjectedError
from ray_jax_ckpt.testing.equality import assert_identical
from ray_jax_ckpt.testing.live import LiveRun, find_run
from ray_jax_ckpt.testing.plan import Armed, FaultPlan, Fired
from ray_jax_ckpt.testing.processes import (
    drain_node,
    kill_node,
    kill_process,
    kill_raylet,
    pause_node,
    pause_process,
    resume_node,
    resume_process,
)

__all__ = [
    "POINTS",
    "Armed",
    "Fault",
    "FaultPlan",
    "Fired",
    "InjectedError",
    "LiveRun",
    "assert_identical",
    "drain_node",
    "find_run",
    "kill_node",
    "kill_process",
    "kill_raylet",
    "pause_node",
    "pause_process",
    "resume_node",
    "resume_process",
]
