"""A driver to be killed: of each of its runs the second checkpoint is held at another moment of its way to storage."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ray
from support import eventually

from persist import steered
from persist.conftest import Disk, PersistedRun
from persist.test_failures import take
from ray_jax_ckpt import worker
from ray_jax_ckpt.memory import fleet


def begin(root: Path, moment: str, held: str, nodes: list[tuple[str, str]]) -> list[int]:
    """Has a run written as far as it is to be; returns its processes."""
    disk = Disk(root / moment / "control")
    run = PersistedRun(nodes, str(root / moment / "run"), {"every_n_steps": 10}, disk.filesystem)
    worker.current = worker.current_or_none = run.current
    run.begin(copies=2)
    take(run, 10)
    run.await_steps(10)
    disk.says(held)
    take(run, 20)
    eventually(lambda: 20 in run.steps() if not held else (root / moment / "met").exists(), 60)
    if moment not in ("nothing", "all"):
        eventually(lambda: [*Path(run.path).rglob("*-step-000000020-*/ray_jax_ckpt/rank_1.json")], 60)
    return ray.get([handle.pid.remote() for handle in (run.coordinator, *fleet.living_stores(run.run).values())])


def main(address: str, root: str, moments: dict[str, str], nodes: list[tuple[str, str]]) -> None:
    ray.init(address=address, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(steered)
    pids = [pid for moment, held in moments.items() for pid in begin(Path(root), moment, held, nodes)]
    print(json.dumps(pids), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), [tuple(node) for node in json.loads(sys.argv[4])])
