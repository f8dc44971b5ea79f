"""JaxConfig in a real run, started three times: a worker dies while JAX starts, and another in the middle of training.

One cluster and one run serve all tests of this file; each looks at what the run left behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from ray_jax_ckpt._backend import JaxBackend
from ray_jax_ckpt.trainer import JaxConfig

# Three starts of two processes: under a minute on an idle machine with two cores, minutes on a busy one.
pytestmark = pytest.mark.timeout(420)

ROOT = Path(__file__).resolve().parents[2]


def first_time(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FragileBackend(JaxBackend):
    """Loses a worker the first time it starts."""

    def on_start(self, worker_group, backend_config):
        if first_time(Path(os.environ["RUN_DIR"]) / "died-starting"):
            with pytest.raises(RayActorError):
                ray.get(worker_group.execute_single_async(1, die))
        super().on_start(worker_group, backend_config)


class FragileConfig(JaxConfig):
    @property
    def backend_cls(self):
        return FragileBackend


def train(config):
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import NamedSharding, PartitionSpec

    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    numbers = np.arange(jax.device_count(), dtype=np.float32)
    array = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    total = float(jax.jit(lambda x: (x * 2).sum())(array))

    directory, rank = Path(config["directory"]), ray.train.get_context().get_world_rank()
    record = {
        "platform": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [jax.local_device_count(), jax.device_count()],
        "total": total,
        "hits": len(hits),
    }
    second = (directory / "died-training").exists()
    (directory / f"start-{2 if second else 1}-rank-{rank}.json").write_text(json.dumps(record))
    if not second:
        sync_global_devices("both have written")
        if rank == 1:
            first_time(directory / "died-training")
            die()
    # The survivor waits here for a peer that is gone, and is killed.
    sync_global_devices("end")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("run")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")  # Ray Data warns of its own settings
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RUN_DIR", str(directory))
        patch.delenv("JAX_PLATFORMS", raising=False)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            JaxTrainer(
                train,
                train_loop_config={"directory": str(directory)},
                jax_config=FragileConfig(compilation_cache_dir=str(directory / "xla")),
                # All CPUs: a group that leaves its placement group behind could not be started again.
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}),
                run_config=RunConfig(
                    storage_path=str(directory / "storage"),
                    failure_config=FailureConfig(max_failures=1),
                    worker_runtime_env={"env_vars": {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}},
                ),
            ).fit()
        finally:
            ray.shutdown()
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    return directory


def records(run_dir: Path, start: int) -> list[dict]:
    return [json.loads((run_dir / f"start-{start}-rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_run_outlives_a_death_while_jax_starts_and_one_in_training(run_dir):
    assert (run_dir / "died-starting").exists()
    assert (run_dir / "died-training").exists()


@pytest.mark.parametrize("start", [1, 2])
def test_workers_form_one_program_on_cpu(run_dir, start):
    for record in records(run_dir, start):
        assert record["platform"] == "cpu"
        assert record["processes"] == 2
        assert record["devices"] == [2, 4]
        assert record["total"] == 12.0


def test_restarted_workers_load_their_programs(run_dir):
    assert all(record["hits"] > 0 for record in records(run_dir, 2))
    assert not list((run_dir / "xla").glob("*-partial"))
