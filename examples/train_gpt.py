"""Trains a small GPT with Ray Train and JAX through the death of a worker and of a node, from memory.

    python examples/train_gpt.py                 own cluster, two failures, the same training uninterrupted, comparison
    python examples/train_gpt.py --no-faults     own cluster, just train
    python examples/train_gpt.py --address auto  on a cluster that runs already

`train_fn` and `make_trainer` are all that a user of ray_jax_ckpt writes; the folder `gpt` holds the model and data, and
what makes this a demonstration: a cluster to break, the failures, the comparison. Exit code: 0 all well, 1 the
interrupted training differs from the uninterrupted one, 2 something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt import cluster
from gpt.compare import Comparison, compare, draw
from gpt.console import Console
from gpt.faults import Death, Fault, FaultInjector, plan_faults
from gpt.progress import read_package_events, read_progress
from gpt.recovery import describe, recoveries

if TYPE_CHECKING:
    from ray.train.v2.jax import JaxTrainer

NUM_WORKERS = 2
DEVICES_PER_WORKER = 2


def train_fn(config: dict[str, Any]) -> None:
    """Trains on one of the workers. All that keeps it alive through failures: `restore`, and `snapshot` in the loop."""
    import ray.train
    from gpt.compare import save_final_state
    from gpt.data import TextBatches, load_text
    from gpt.model import GPTConfig, Training, make_mesh
    from gpt.progress import Progress

    import ray_jax_ckpt as rjc

    context = ray.train.get_context()
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    progress = Progress(config["run_dir"], rank, ray.get_runtime_context().get_node_id())
    progress.event("entered")
    gpt = GPTConfig(num_steps=config["steps"], seed=config["seed"])
    training = Training(gpt, make_mesh())
    batches = TextBatches(
        load_text(),
        batch_size=gpt.batch_size // num_ranks,
        length=gpt.length,
        rank=rank,
        num_ranks=num_ranks,
        seed=gpt.seed,
    )

    if (checkpoint := ray.train.get_checkpoint()) is not None:
        progress.event("restoring")
        restored = rjc.restore(checkpoint, training.abstract_state(), data=batches)
        state, start = restored.state, restored.step
        progress.event("restored", step=restored.step, source=restored.source)
        del restored  # it holds the state too, which the first step donates
    else:
        state, start = training.init_state(), 0

    loss = float("nan")
    for step in range(start + 1, config["steps"] + 1):
        state, loss = training.step(state, next(batches))
        rjc.snapshot(step, state, data=batches, metrics={"loss": loss})
        progress.step(step, float(loss))

    digest = save_final_state(config["run_dir"], rank, state)
    progress.event("finished", loss=float(loss), digest=digest)


def make_trainer(name: str, storage: Path, arguments: argparse.Namespace) -> JaxTrainer:
    """Ray's own trainer, with a `CheckpointManager` that takes a snapshot every few steps and keeps it on two nodes."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    import ray_jax_ckpt as rjc

    snapshot = rjc.SnapshotConfig(every_n_steps=arguments.snapshot_every, copies=2)
    return JaxTrainer(
        train_fn,
        train_loop_config={"steps": arguments.steps, "seed": arguments.seed, "run_dir": str(storage / name)},
        jax_config=rjc.JaxConfig(),
        scaling_config=ScalingConfig(
            num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=3),
            callbacks=[rjc.CheckpointManager(snapshot=snapshot)],
            worker_runtime_env={
                "env_vars": {
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES_PER_WORKER}",
                }
            },
        ),
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with a message if it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="train steps (default: %(default)s)")
    parser.add_argument("--snapshot-every", type=int, default=5, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and data order (default: 0)")
    parser.add_argument("--no-faults", action="store_true", help="just train")
    parser.add_argument("--address", help="of an existing Ray cluster; on this machine only, faults can be shown there")
    parser.add_argument("--out", type=Path, help="folder for runs, log and picture; else only ./train_gpt.png is kept")
    parser.add_argument("--verbose", action="store_true", help="show all that Ray and the workers print")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.snapshot_every < 1:
        parser.error("--steps and --snapshot-every must be at least 1")
    arguments.plan = []
    if not arguments.no_faults:
        try:
            arguments.plan = plan_faults(arguments.steps, arguments.snapshot_every, nodes=arguments.address is None)
        except ValueError as error:
            parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    arguments = parse_arguments(argv)
    work = (arguments.out or Path(tempfile.mkdtemp(prefix="train_gpt-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    picture = (work if arguments.out else Path.cwd()) / "train_gpt.png"
    kept_log = (work if arguments.out else Path(tempfile.gettempdir()).resolve()) / "train_gpt.log"
    console = Console(work / "train_gpt.log", verbose=arguments.verbose)
    try:
        with console:
            return demonstrate(arguments, work, picture, console)
    except Exception as error:
        return _explain(error, console.log, kept_log)
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own way to take Ctrl-C, and SIGTERM
        print("interrupted; cluster and workers are shut down")
        return 130
    finally:
        if not arguments.out:
            shutil.rmtree(work, ignore_errors=True)


def demonstrate(arguments: argparse.Namespace, work: Path, picture: Path, console: Console) -> int:
    """Starts or joins a cluster, trains with failures, then without, and compares."""
    cluster.prepare_environment()
    release_spare = _nothing
    with contextlib.ExitStack() as stack:
        if arguments.address:
            stack.enter_context(cluster.connected(arguments.address))
            console.say(f"connected to the cluster at {arguments.address}")
            if arguments.plan:
                console.say("only a worker will be killed; killing a node takes an own cluster (no --address)")
        else:
            spare = any(fault.kind == "node" for fault in arguments.plan)
            nodes = f"a head, {NUM_WORKERS} nodes" + " and a spare" * spare
            console.say(f"starting a cluster: {nodes}; log: {console.log}")
            release_spare = stack.enter_context(cluster.own_cluster(num_nodes=NUM_WORKERS, spare=spare))
            console.say("cluster is up")
        if not arguments.plan:
            train("plain", work, arguments, [], release_spare, console)
            return 0
        deaths = train("interrupted", work, arguments, arguments.plan, release_spare, console)
        show_recoveries(work / "interrupted", deaths, console)
        train("uninterrupted", work, arguments, [], release_spare, console)
    return conclude(work, arguments, deaths, picture, console)


def train(
    name: str,
    storage: Path,
    arguments: argparse.Namespace,
    plan: list[Fault],
    release_spare: Callable[[], None],
    console: Console,
) -> list[Death]:
    """Trains once, carrying out the plan; returns what died.

    Raises:
        RuntimeError: A planned fault could not be carried out.
    """
    shutil.rmtree(storage / name, ignore_errors=True)
    failures = f", {len(plan)} failures to come" if plan else ""
    console.say(f"run '{name}': {arguments.steps} steps, a snapshot every {arguments.snapshot_every}{failures}")
    injector = FaultInjector(storage / name, plan, console.say, release_spare)
    injector.start()
    try:
        make_trainer(name, storage, arguments).fit()
    finally:
        injector.close()
    losses = [record["loss"] for record in read_progress(storage / name) if record["event"] == "finished"]
    console.say(f"run '{name}' is done: loss {losses[-1]:.4f}")
    if len(injector.deaths) < len(plan):
        raise RuntimeError(injector.problem or "the training ended before every failure had been injected")
    return injector.deaths


def show_recoveries(run_dir: Path, deaths: list[Death], console: Console) -> None:
    """Prints what was restored after each death, and how long each phase took."""
    for recovery in recoveries(deaths, read_progress(run_dir), read_package_events(run_dir)):
        console.say(describe(recovery))


def conclude(work: Path, arguments: argparse.Namespace, deaths: list[Death], picture: Path, console: Console) -> int:
    """Compares both runs, draws them, and returns the exit code."""
    runs = [(work / name, read_progress(work / name)) for name in ("interrupted", "uninterrupted")]
    result: Comparison = compare(runs[0], runs[1], arguments.steps)
    draw(picture, runs[0][1], runs[1][1], deaths)
    console.say(f"loss curves: {picture}")
    for difference in result.differences[:5]:
        console.show(f"    differs: {difference}")
    console.say(
        f"bit-identical to the uninterrupted run: {'YES' if result.identical else 'NO'} "
        f"({result.num_losses} losses, {result.num_repeated} of them of repeated steps; "
        f"final state: {result.num_arrays} shards, {result.num_bytes / 1e6:.1f} MB; "
        f"{len(result.differences)} differences)"
    )
    return 0 if result.identical else 1


def _nothing() -> None:
    pass


def _explain(error: Exception, log: Path, kept: Path) -> int:
    """Says what went wrong, and where the log is, which outlives the work folder."""
    if log.exists():
        with log.open("a") as file:
            traceback.print_exception(error, file=file)
        if log != kept:
            shutil.copyfile(log, kept)
    else:
        traceback.print_exception(error)
    print(f"error: {type(error).__name__}: {error}", f"log: {kept}" if kept.exists() else "", sep="\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
