"""Runs whose stores write to storage: real stores and a real coordinator, ranks in the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray
from group import Group
from ray.cluster_utils import Cluster
from support import eventually, find_checkpoints, local_cluster, new_run, workers_of

import ray_jax_ckpt as rjc
from persist import steered
from ray_jax_ckpt import worker
from ray_jax_ckpt.memory.messages import RunIdentity
from ray_jax_ckpt.testing import FaultPlan

TIMEOUT_S = 60


@pytest.fixture(scope="package")
def shared_plan() -> Iterator[FaultPlan]:
    """In the environment before the cluster starts, so that all its processes have it."""
    with FaultPlan() as found:
        yield found


@pytest.fixture
def plan(shared_plan: FaultPlan) -> Iterator[FaultPlan]:
    """What is left of it does not reach the next test."""
    yield shared_plan
    shared_plan.disarm()


@pytest.fixture(scope="package")
def cluster(shared_plan: FaultPlan) -> Iterator[Cluster]:
    with local_cluster(2, object_store_memory=80 * 2**20) as cluster:
        yield cluster


class PersistedRun(Group):
    """A group on two nodes that writes to storage.

    Args:
        nodes: Of its ranks.
        path: Of the run's directory.
        persist: Settings of PersistConfig; None: only what is reported is written.
        filesystem: That the directory is on.
        rebuild: See `RunIdentity`.
        logs: Directory of what the cluster's processes say.
    """

    def __init__(
        self,
        nodes: list[tuple[str, str]],
        path: str,
        persist: dict[str, Any] | None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        rebuild: Callable[[], pyarrow.fs.FileSystem] | None = None,
        logs: Path = Path(),
    ) -> None:
        self._logs = logs
        self.path, self.filesystem = path, filesystem or pyarrow.fs.LocalFileSystem()
        run = new_run()
        directory = RunIdentity(run, path, self.filesystem, rebuild)
        config = None if persist is None else rjc.PersistConfig(**{"retries": 0, "timeout_s": TIMEOUT_S} | persist)
        super().__init__(nodes, run, directory=directory, persist=config)

    def take(self, state: Any, **options: Any) -> Any:
        """A snapshot of all ranks at the next step; returns rank 0's handle."""
        self.step += 1
        return self.take_at(self.step, state, **options)

    def take_at(self, step: int, state: Any, **options: Any) -> Any:
        """The same at a step."""
        self.step = step
        found = self.all_ranks(lambda rank: rjc.snapshot(step, state, **options))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found[0]

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints on storage."""
        return sorted(manifest.step or 0 for _, manifest in find_checkpoints(self.filesystem, self.path))

    def path_of(self, step: int) -> str:
        """Directory of the newest complete checkpoint of a step."""
        return max(path for path, manifest in find_checkpoints(self.filesystem, self.path) if manifest.step == step)

    def await_steps(self, *steps: int) -> None:
        """Waits until exactly these are on storage."""
        eventually(lambda: self.steps() == sorted(steps), TIMEOUT_S)

    def settle(self) -> str:
        """Training has ended; returns what is not on storage."""
        return ray.get(self.coordinator.settle.remote(), timeout=2 * TIMEOUT_S)

    def drain(self) -> None:
        """The ranks' last snapshots are in their stores."""
        for session in self.sessions:
            session.drain(TIMEOUT_S)

    def await_events(self, name: str, *why: str) -> None:
        """Waits until events of a kind were noted for exactly these reasons."""
        eventually(lambda: [event["why"] for event in self.events(name)] == list(why), TIMEOUT_S)

    def warnings(self) -> str:
        """What the coordinator has said on its standard error."""
        pid = ray.get(self.coordinator.pid.remote())
        return "".join(path.read_text() for path in self._logs.glob(f"worker-*-{pid}.err"))

    def events(self, name: str) -> list[dict[str, Any]]:
        """The run's events of one kind. On a local disk only."""
        file = Path(self.path, "ray_jax_ckpt", "events.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


class Disk:
    """A disk of the stores, and what it is told to do."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self.path = str(control)
        self.says("")

    def says(self, what: str) -> None:
        # At once, for whoever reads it.
        aside = self._control.with_suffix(".new")
        aside.write_text(what)
        aside.rename(self._control)

    @property
    def filesystem(self) -> pyarrow.fs.FileSystem:
        return pyarrow.fs.PyFileSystem(steered.Steered(self.path))

    @property
    def of_each_node(self) -> pyarrow.fs.FileSystem:
        """One that the nodes do not share."""
        return pyarrow.fs.PyFileSystem(steered.PerNode(self.path))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    ray.cloudpickle.register_pickle_by_value(steered)
    found = Disk(tmp_path / "control")
    yield found
    # Whoever waits goes on.
    found.says("")
    ray.cloudpickle.unregister_pickle_by_value(steered)


@pytest.fixture(scope="module")
def reporting(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PersistedRun]:
    """A run that writes nothing by itself, for all tests of a module."""
    run = PersistedRun(workers_of(cluster), str(tmp_path_factory.mktemp("reporting") / "run"), None)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def run_of(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PersistedRun]]:
    """Makes runs in the test's directory: settings are those of PersistConfig."""
    made: list[PersistedRun] = []

    def make(
        *,
        filesystem: pyarrow.fs.FileSystem | None = None,
        path: str | None = None,
        rebuild: Any = None,
        snapshots: dict[str, Any] | None = None,
        persists: bool = True,
        **persist: Any,
    ) -> PersistedRun:
        where = path or str(tmp_path / "run")
        logs = Path(cluster.head_node.get_logs_dir_path())
        settings = persist if persists else None
        made.append(PersistedRun(workers_of(cluster), where, settings, filesystem, rebuild, logs))
        for name in ("current", "current_or_none"):
            monkeypatch.setattr(worker, name, made[-1].current)
        made[-1].begin(copies=2, **(snapshots or {}))
        return made[-1]

    yield make
    for run in made:
        run.close()
