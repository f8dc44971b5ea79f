"""What the calls say where there is no session, and what handles and the manager are as objects."""

from __future__ import annotations

import contextlib
import pickle
import types
import warnings

import pyarrow.fs
import pytest
import ray.train

import ray_jax_ckpt as rjc
from ray_jax_ckpt import _ray_compat, handover, session, start_hook
from ray_jax_ckpt.checkpoint import SnapshotCheckpoint, UndecidedCheckpoint
from ray_jax_ckpt.errors import ConfigError, NoSessionError, NotSupportedError, RestoreError
from ray_jax_ckpt.membership import warn_of_few_domains
from ray_jax_ckpt.memory.messages import Member
from ray_jax_ckpt.model.shards import Generation

GENERATION = Generation(2, 1, 30)


@pytest.mark.parametrize(
    "call",
    [lambda: rjc.snapshot(1, {}), lambda: rjc.restore(SnapshotCheckpoint(GENERATION)), rjc.wait, rjc.latest],
    ids=["snapshot", "restore", "wait", "latest"],
)
def test_outside_of_a_run_the_calls_say_what_to_do(call, monkeypatch):
    with pytest.raises(NoSessionError, match=r"JaxTrainer.*num_workers=0.*callbacks=\[ray_jax_ckpt\.CheckpointManager"):
        call()
    monkeypatch.setattr(session, "_current", session.Wiring(types.SimpleNamespace(), rjc.SnapshotConfig()))
    with pytest.raises(NoSessionError, match="decision has not arrived"):
        call()


def test_a_handle_of_no_session_is_a_checkpoint_without_files(tmp_path):
    handle = SnapshotCheckpoint(GENERATION, {"loss": 1.0})
    assert isinstance(handle, ray.train.Checkpoint)
    assert "step=30" in repr(handle)
    for read in (handle.as_directory().__enter__, handle.to_directory, lambda: handle.to_directory(str(tmp_path))):
        with pytest.raises(NotSupportedError, match=r"step 30 has files only in the train function"):
            read()
    # What Ray does with a reported checkpoint.
    with pytest.raises(NotSupportedError, match="step 30"):
        pyarrow.fs.copy_files(
            handle.path,
            str(tmp_path),
            source_filesystem=handle.filesystem,
            destination_filesystem=pyarrow.fs.LocalFileSystem(),
        )


def test_handles_travel():
    handle = SnapshotCheckpoint(GENERATION, {"loss": 1.0})
    copy = pickle.loads(pickle.dumps(handle))
    assert (copy.generation, copy.step, copy.metrics) == (GENERATION, 30, {"loss": 1.0})
    undecided = pickle.loads(pickle.dumps(UndecidedCheckpoint()))
    for read in (undecided.as_directory, undecided.to_directory):
        with pytest.raises(RestoreError, match="could not be decided"):
            read()


@pytest.fixture
def context(monkeypatch):
    """A worker's context, with what Ray would restore."""
    found = types.SimpleNamespace(checkpoint="what Ray has")

    def replace(checkpoint):
        before, found.checkpoint = found.checkpoint, checkpoint
        return before

    monkeypatch.setattr(_ray_compat, "set_checkpoint", replace)
    monkeypatch.setattr(_ray_compat, "world_rank", lambda: 0)
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.setattr(handover, "_reported", [])
    return found


def decision(located):
    member = types.SimpleNamespace(node_id="here", domain="here", rank=0)
    group = {"attempt": 2, "members": (member,), "stores": {0: None}, "leaving": frozenset()}
    return types.SimpleNamespace(**group, secret="", located=located, stored=None, ray_counts=True, needed="")


@pytest.mark.parametrize("located", [None, types.SimpleNamespace(generation=GENERATION)], ids=["nothing", "something"])
def test_a_worker_is_armed_until_the_decision_comes(context, located):
    wiring = session.Wiring(types.SimpleNamespace(), rjc.SnapshotConfig())
    handover.arm(wiring)
    assert isinstance(context.checkpoint, UndecidedCheckpoint)
    with pytest.raises(NoSessionError, match="not arrived"):
        session.current()
    handover.decide(decision(located))
    assert session.current().decision.attempt == 2
    if located is None:
        assert context.checkpoint == "what Ray has"
    else:
        assert context.checkpoint.generation == GENERATION


def test_a_decision_needs_an_armed_worker(context):
    with pytest.raises(NoSessionError, match="armed"):
        handover.decide(decision(None))


# --- the manager


def test_the_manager_travels_before_it_is_started():
    manager = rjc.CheckpointManager(snapshot=rjc.SnapshotConfig(every_n_steps=3))
    copy = pickle.loads(pickle.dumps(manager))
    assert copy._config == manager._config
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(copy))._config.every_n_steps == 3


def test_the_manager_takes_a_config_and_nothing_else():
    for wrong in ({"every_n_steps": 3}, 5, "memory"):
        with pytest.raises(ConfigError, match="SnapshotConfig"):
            rjc.CheckpointManager(snapshot=wrong)


def test_a_run_that_is_told_nothing_of_stays_calm(caplog):
    # Its start failed: every later hook does nothing, and none raises.
    manager = rjc.CheckpointManager()
    manager.after_controller_start(None)
    assert "after_controller_start failed" in caplog.text
    assert manager.before_init_train_context([]) == {}
    for hook in (
        manager.after_worker_group_start,
        manager.before_worker_group_shutdown,
        manager.after_controller_finish,
    ):
        hook(None)
    manager.before_controller_abort()


def test_fewer_failure_domains_than_copies_are_said_plainly():
    members = [Member(rank, "node", "127.0.0.1", rank, "node") for rank in range(2)]
    with pytest.warns(
        RuntimeWarning, match=r"copies=2, but the workers, 2 in all, are in 1 failure domain, .*worker processes"
    ):
        warn_of_few_domains(members, 2)
    with pytest.warns(RuntimeWarning, match=r"One worker cannot be spread: ask for copies=1\."):
        warn_of_few_domains(members[:1], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_few_domains(members, 1)


class Group:
    """A worker group that notes what it is asked to run."""

    def __init__(self):
        self.asked = []

    def execute_async(self, function, *arguments):
        self.asked.append(function)


def started(manager, fails=False):
    """What the workers of a group are sent in its start."""
    group = Group()
    with contextlib.suppress(ZeroDivisionError), manager.on_worker_group_start():
        manager.after_worker_group_start(group)
        assert group.asked == []
        if fails:
            raise ZeroDivisionError
    return group.asked


def test_workers_are_told_when_everybody_else_has_set_them_up():
    # A manager of RAY_TRAIN_CALLBACKS comes before the backend, and JAX must not be imported before that.
    manager = rjc.CheckpointManager()
    assert started(manager) == []
    manager._coordinator = types.SimpleNamespace(record=types.SimpleNamespace(remote=lambda *_: None))
    assert started(manager) == [start_hook.arm]
    manager._decision = "on its way"
    assert started(manager) == [start_hook.arm, start_hook.decide]
    assert started(manager, fails=True) == []


def run_with(*callbacks):
    return types.SimpleNamespace(run_config=types.SimpleNamespace(callbacks=list(callbacks)))


def test_of_several_managers_the_first_of_the_run_config_counts(monkeypatch):
    monkeypatch.setenv("RAY_JAX_CKPT_SNAPSHOT_EVERY_N_STEPS", "3")
    in_config, second, of_environment = rjc.CheckpointManager(), rjc.CheckpointManager(), rjc.EnvCheckpointManager()
    shipped = pickle.loads(pickle.dumps(run_with(in_config, second)))
    assert not in_config._stands_back(shipped)
    assert not of_environment._stands_back(run_with())
    for other in (of_environment, second):
        with pytest.warns(RuntimeWarning, match=r"RunConfig\(callbacks=...\) has a CheckpointManager, which counts"):
            other.after_controller_start(shipped)
        assert other._coordinator is None
        assert started(other) == []


def test_a_run_that_is_switched_off_is_as_without_this_package(monkeypatch, context):
    monkeypatch.setenv("RAY_JAX_CKPT_ENABLED", "0")
    manager = pickle.loads(pickle.dumps(rjc.CheckpointManager()))
    monkeypatch.delenv("RAY_JAX_CKPT_ENABLED")
    manager.after_controller_start(None)
    (told,) = started(manager)
    told()
    assert context.checkpoint == "what Ray has"
    assert (rjc.snapshot(1, {}), rjc.wait(), rjc.latest(), session.current_or_none()) == (None, None, None, None)
    with pytest.raises(NoSessionError, match="RAY_JAX_CKPT_ENABLED=0"):
        rjc.restore(SnapshotCheckpoint(GENERATION))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"resume": "always"}, "say one of 'auto', 'never', 'must'"),
        ({"resume_from": 7}, "takes a path or URI, got int"),
    ],
)
def test_what_cannot_be_resumed_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        rjc.CheckpointManager(**arguments)


def test_a_place_to_resume_from_means_the_same_in_other_processes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert rjc.CheckpointManager(resume_from="runs/a")._resume.place == str(tmp_path / "runs/a")
    assert rjc.CheckpointManager(resume_from="s3://bucket/a")._resume.place == "s3://bucket/a"
