"""Kills at random what belongs to a running training, again and again, and checks what comes back.

    python benchmarks/soak.py                         towards 50 kills; the next call goes on where this one ends
    python benchmarks/soak.py --budget-s 200          as many of them as fit into the time

A call ends before the third death of a node, since spare nodes take memory.

A `JaxTrainer` run of two workers on two nodes of this machine, with a snapshot every five steps. Killed (SIGKILL) are
a worker, a store, both of one rank at the same moment, the coordinator, or a whole node, at random moments. After each
kill it is checked that all ranks restore the same step, bit for bit what it has to be; that no step that was protected
before the kill is lost; that snapshots become protected again, without a restart if no worker died; and that the run
has two stores again. What a kill cost goes to the result file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import cluster as bench_cluster
from bench import soak_job
from bench.report import describe_machine

RESULT = Path(__file__).resolve().parent / "results" / "soak.json"
WEIGHTS = {"worker": 6, "store": 4, "both": 4, "coordinator": 4, "node": 2}
RESTARTING = ("worker", "both", "node")
LONGEST_PAUSE_S = 2.0
RECOVERY_TIMEOUT_S = 180.0
SPARE_NODES = 2
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in the result file at the end (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no kill after so long (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="what may be killed")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file, continued (default: %(default)s)")
    return parser.parse_args(argv)


class Chaos(threading.Thread):
    """Kills, waits for the recovery, checks it. Ends the training when it has done its part, or when a check fails."""

    def __init__(self, work: Path, plan: list[tuple[str, int, float]], deadline: float) -> None:
        """`plan`: kind, rank and the pause before each kill."""
        super().__init__(name="chaos", daemon=True)
        from ray_jax_ckpt.testing import find_run

        self.records: list[dict[str, Any]] = []
        self.problem = ""
        self._work, self._plan, self._deadline = work, plan, deadline
        self._live = find_run("soak", str(work / "storage"))

    def run(self) -> None:
        """In order, until the plan or the time is over."""
        try:
            since = 0.0
            for kind, rank, pause_s in self._plan:
                self._until(lambda since=since: self._protected(since), "the training goes on")
                if time.monotonic() > self._deadline:
                    break
                time.sleep(pause_s)
                record = self._one(kind, rank)
                since = record.pop("recovered_at")
                self.records.append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)  # stdout is held back while Ray trains
        except Exception:
            self.problem = traceback.format_exc()
        steps = [event["step"] for event in soak_job.read(self._work) if event["event"] == "step"]
        (self._work / "stop").write_text(str(max(steps, default=0) + 10 * soak_job.EVERY))

    def _one(self, kind: str, rank: int) -> dict[str, Any]:
        begun, dead = self._kill(kind, rank)
        events = soak_job.read(self._work)
        safe = max((e["step"] for e in events if e["event"] == "protected" and e["time"] < begun), default=0)
        last = max(e["step"] for e in events if e["event"] == "step" and e["time"] < dead)
        record: dict[str, Any] = {"kind": kind, "rank": rank, "protected_step": safe, "last_step": last}
        if kind in RESTARTING:
            record |= self._check_restore(begun, safe)
            # A step is in the log when it is over; its snapshot may be complete a little earlier.
            record["steps_lost"] = max(0, last - record["restored_step"])
        # The step after the last one may have been on its way already.
        done = self._until(lambda: self._protected(dead, last + 1), f"recovery from the death of a {kind}")
        again = [event for event in soak_job.read(self._work) if event["event"] == "started" and event["time"] > begun]
        assert kind in RESTARTING or not again, f"the death of a {kind} restarted the training: {again}"
        self._until(lambda: _num_stores() == 2, "the end of all stores that serve no rank")
        return record | {"recovery_s": round(done - begun, 2), "recovered_at": done}

    def _check_restore(self, begun: float, safe: int) -> dict[str, Any]:
        """All ranks restored one step, bit for bit, and nothing that was safe is lost."""

        def both() -> list[dict[str, Any]]:
            events = [
                e for e in soak_job.read(self._work) if e["time"] > begun and e["event"] in ("restored", "started")
            ]
            last = {event["rank"]: event for event in events if event["event"] == "restored"}
            afresh = [event for event in events if event["event"] == "started" and event["step"] == 0]
            assert not afresh, f"a rank started afresh: {afresh}"
            return list(last.values()) if len(last) == 2 else []

        found = self._until(both, "a restore on all ranks")
        steps = {event["step"] for event in found}
        assert len(steps) == 1, f"ranks restored different steps: {found}"
        assert min(steps) >= safe, f"step {safe} was protected, and {min(steps)} was restored"
        assert not any(event["problem"] for event in found), f"not bit-identical: {found}"
        return {"restored_step": min(steps), "sources": sorted(event["source"] for event in found)}

    def _kill(self, kind: str, rank: int) -> tuple[float, float]:
        """Returns when it began and when all were dead, by the clock of the log."""
        from ray_jax_ckpt.testing import kill_node, kill_process

        victims: list[int] = []
        if kind == "coordinator":
            victims.append(self._live.coordinator())
        if kind in ("worker", "both"):
            victims.append(self._start_of(rank)["pid"])
        if kind in ("store", "both"):
            victims.append(self._live.stores()[rank])
        begun = time.time()
        if kind == "node":
            kill_node(self._start_of(rank)["node"])
        for pid in victims:
            kill_process(pid)
        return begun, time.time()

    def _start_of(self, rank: int) -> dict[str, Any]:
        return [e for e in soak_job.read(self._work) if e["event"] == "started" and e["rank"] == rank][-1]

    def _protected(self, since: float, step: int = 0) -> float | None:
        """When all ranks had got beyond a step and protected a snapshot again."""
        times = {}
        for event in soak_job.read(self._work):
            if event["event"] == "protected" and event["time"] > since and event["step"] > step:
                times.setdefault(event["rank"], event["time"])
        return max(times.values()) if len(times) == 2 else None

    def _until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {RECOVERY_TIMEOUT_S:g} s")
            time.sleep(0.05)
        return value


def _num_stores() -> int:
    """Of all runs on this cluster, which has one."""
    import ray

    from ray_jax_ckpt.memory.claim import coordinator_name
    from ray_jax_ckpt.memory.fleet import NAMESPACE

    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    mine = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    return sum(not name.startswith(coordinator_name("")) for name in mine)


def plan_kills(seed: int, kinds: Sequence[str], count: int) -> list[tuple[str, int, float]]:
    """Kind, rank, and seconds before it: the same for the same seed."""
    numbers = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        (numbers.choices(kinds, weights)[0], numbers.randrange(2), numbers.uniform(0, LONGEST_PAUSE_S))
        for _ in range(count)
    ]


def soak(work: Path, plan: list[tuple[str, int, float]], budget_s: float) -> Chaos:
    """One run of the trainer, with as many kills of the plan as fit into the budget."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    import ray_jax_ckpt as rjc

    deadline = time.monotonic() + budget_s
    cluster: Any = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "include_dashboard": False})
    try:
        # Spares are started now, since Ray starts nodes in the main thread only.
        for _ in range(2 + sum(kind == "node" for kind, _, _ in plan)):
            cluster.add_node(**NODE)
        # Ray Train's clean-up asks "the" cluster of the machine, and must not ask somebody else's.
        environment = {"env_vars": {"RAY_ADDRESS": cluster.address}}
        ray.init(address=cluster.address, runtime_env=environment, log_to_driver=False)
        chaos = Chaos(work, plan, deadline)
        trainer = JaxTrainer(
            soak_job.train,
            train_loop_config={"work": str(work)},
            jax_config=rjc.JaxConfig(compilation_cache_dir=str(work / "xla")),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="soak",
                storage_path=str(work / "storage"),
                failure_config=FailureConfig(max_failures=-1),
                callbacks=[
                    rjc.CheckpointManager(snapshot=rjc.SnapshotConfig(every_n_steps=soak_job.EVERY, timeout_s=30))
                ],
                worker_runtime_env={
                    "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
                },
            ),
        )
        chaos.start()
        try:
            bench_cluster.fit(trainer)
        except Exception:
            # What was found before is kept.
            chaos.problem = chaos.problem or traceback.format_exc()
        chaos.join(30)
        return chaos
    finally:
        ray.shutdown()
        cluster.shutdown()


def summarize(kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Kills by kind; steps lost and seconds of recovery, median and most."""
    summary: dict[str, Any] = {}
    for kind, count in Counter(kill["kind"] for kill in kills).items():
        mine = [kill for kill in kills if kill["kind"] == kind]
        seconds, lost = (
            sorted(k["recovery_s"] for k in mine),
            sorted(k["steps_lost"] for k in mine if "steps_lost" in k),
        )
        summary[kind] = {
            "kills": count,
            "recovery_s": {"median": seconds[len(seconds) // 2], "max": seconds[-1]},
            "steps_lost": {"median": lost[len(lost) // 2], "max": lost[-1]} if lost else None,
        }
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Goes on where the result file ends. Returns the exit code."""
    arguments = parse_arguments(argv)
    bench_cluster.prepare_environment()
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": [], "kills": []}
    done = len(result["kills"])
    plan = plan_kills(arguments.seed, arguments.kinds, arguments.kills)[done:]
    node_kills = [number for number, (kind, _, _) in enumerate(plan) if kind == "node"]
    plan = plan[: node_kills[SPARE_NODES]] if len(node_kills) > SPARE_NODES else plan
    if not plan:
        print(f"{done} kills are in {arguments.out}: nothing to do")
        return 0
    with tempfile.TemporaryDirectory(prefix="rjcs-") as folder:
        chaos = soak(Path(folder), plan, arguments.budget_s)
    result["runs"].append({**describe_machine(), "seed": arguments.seed, "kills": len(chaos.records)})
    result["kills"] += chaos.records
    result["failed"] = chaos.problem
    result["summary"] = summarize(result["kills"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    if chaos.problem:
        print(chaos.problem, file=sys.stderr)
    return 1 if chaos.problem else 0


if __name__ == "__main__":
    sys.exit(main())
