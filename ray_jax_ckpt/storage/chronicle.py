"""What a run's state becomes by what happens to the run: pure functions of a state and an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray_jax_ckpt.model import metrics as metrics_
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.storage.manifest import check_path
from ray_jax_ckpt.storage.records import GONE, AttemptRecord, Record, State, Tier

MAX_FAILURES = 32
"""So many checkpoints that came to nothing are remembered."""

Fields = Mapping[str, Any]


def after(state: State, event: str, at_s: float, fields: Fields, run_path: str) -> State:
    """The state after an event of the run's log. Most events change nothing.

    Args:
        state: Before.
        event: Its name.
        at_s: Unix time.
        fields: Its own.
        run_path: The run's directory, which paths in events begin with.
    """
    change = _CHANGES.get(event)
    return state if change is None else change(state, at_s, {**fields, "path": _relative(fields.get("path"), run_path)})


def with_rays_list(state: State, listed: State, found: Mapping[str, Record]) -> State:
    """The state with what Ray lists of what was reported: order, validations, and what it has removed.

    Args:
        state: Before. Its metrics are those of the reports: Ray's list has null for NaN.
        listed: What Ray lists.
        found: What the manifests of some of them say, by path.
    """
    known = {record.path: record for record in state.checkpoints if record.origin == "report"}
    others = [one for one in state.checkpoints if one.origin != "report"]
    # One that Ray has not listed yet is on its way there, unless Ray has removed it since.
    coming = [one for one in known.values() if one.report_index is None and one.reason != GONE]
    paths = {record.path for record in listed.checkpoints}
    merged = [_merged(known.get(one.path), one, found.get(one.path)) for one in listed.checkpoints]
    return state.changed(
        checkpoints=(*others, *merged, *(one for one in coming if one.path not in paths)),
        report_index=max(state.report_index, listed.report_index),
    )


def pending_of(state: State, consistency: str | None, origin: str | None = None) -> list[Record]:
    """What has to be waited for: for "committed" what is being written, for "validated" what is being validated too."""
    waits = {None: (), "committed": (Status.PENDING,), "validated": (Status.PENDING, Status.VALIDATING)}[consistency]
    return [one for one in state.checkpoints if one.status in waits and origin in (None, one.origin)]


def not_settled(pending: list[Record], consistency: str | None, timeout_s: float) -> str:
    """What is said of what is pending still."""
    names = ", ".join(f"{one.path} ({one.status})" for one in pending[:3])
    return (
        f"Not all checkpoints were {consistency} within {timeout_s:g} s: {len(pending)} are not, such as {names}. "
        "Raise timeout_s, or list them as they are with consistency=None."
    )


def _merged(known: Record | None, listed: Record, manifest: Record | None) -> Record:
    base = known or manifest or listed
    fields: dict[str, Any] = {
        "report_index": listed.report_index,
        "status": base.status if base.status is Status.LOST else listed.status,
        "metrics": _filled({} if known is None else known.metrics, metrics_.put_back(listed.metrics)),
        "validation": listed.validation,
        "origin": "report",
    }
    if manifest is not None:
        fields |= {"generation": manifest.generation, "step": manifest.step, "num_bytes": manifest.num_bytes}
    return base.model_copy(update=fields)


def _filled(known: Any, listed: Any) -> Any:
    if isinstance(known, Mapping) and isinstance(listed, Mapping):
        return {**known, **{name: _filled(known.get(name), value) for name, value in listed.items()}}
    return known if listed is None else listed


def _put(state: State, record: Record) -> State:
    others = [one for one in state.checkpoints if one.path != record.path]
    failed = [one for one in others if not (one.status.is_restorable or one.status.is_pending)]
    forgotten = {one.path for one in failed[: max(0, len(failed) + 1 - MAX_FAILURES)]}
    return state.changed(checkpoints=(*(one for one in others if one.path not in forgotten), record))


def _persist(status: Status) -> Callable[[State, float, Fields], State]:
    def change(state: State, at_s: float, fields: Fields) -> State:
        record = Record(
            path=fields["path"],
            generation=fields["generation"],
            step=fields["step"],
            status=Status.TIMED_OUT if fields.get("timed_out") else status,
            reason=fields.get("error") or fields.get("reason") or "",
            metrics=metrics_.decode(fields.get("metrics", {})),
            created_at_s=at_s,
            num_bytes=fields.get("num_bytes"),
        )
        return _put(state, record)

    return change


def _superfluous(state: State, at_s: float, fields: Fields) -> State:
    return state.changed(
        checkpoints=tuple(one for one in state.checkpoints if one.path != fields["path"]),
        removing=(*_without(state.removing, fields["path"]), fields["path"]),
    )


def _removed(state: State, at_s: float, fields: Fields) -> State:
    return state.changed(removing=_without(state.removing, fields["path"]))


def _without(paths: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple(one for one in paths if one != path)


def _suspected(state: State, at_s: float, fields: Fields) -> State:
    lost = {"status": Status.LOST, "reason": fields.get("said", "")}
    return state.changed(
        checkpoints=tuple(
            one.model_copy(update=lost) if one.path == fields["path"] else one for one in state.checkpoints
        )
    )


def _reported(state: State, at_s: float, fields: Fields) -> State:
    if fields["path"] is None or not _is_below(fields["path"]):
        return state
    status = Status.VALIDATING if fields.get("validation") else Status.COMPLETE
    metrics = metrics_.decode(fields.get("metrics", {}))
    return _put(state, Record(path=fields["path"], origin="report", status=status, metrics=metrics, created_at_s=at_s))


def _decision(state: State, at_s: float, fields: Fields) -> State:
    before = _ended(state, "failed", None).attempts
    path = fields["path"]
    tier: Tier | None = "storage" if path else "memory" if fields.get("generation") else None
    if fields.get("tier") in ("memory", "storage", "ray"):
        tier = str(fields["tier"])  # pyright: ignore[reportAssignmentType]
    attempt = AttemptRecord(
        attempt=fields["attempt"],
        step=fields.get("step"),
        generation=fields.get("generation"),
        tier=tier,
        path=path,
        started_at_s=at_s,
    )
    return state.changed(
        attempts=(*(one for one in before if one.attempt != attempt.attempt), attempt),
        first_attempt=fields.get("first_attempt") or state.first_attempt,
    )


def _failed(state: State, at_s: float, fields: Fields) -> State:
    return _ended(state, "failed", fields.get("last_step"))


def _finished(state: State, at_s: float, fields: Fields) -> State:
    return _ended(state, "finished", fields.get("last_step")).changed(finished_at_s=at_s)


def _ended(state: State, how: str, last_step: int | None) -> State:
    """The last attempt ends, unless it has."""
    if not state.attempts or state.attempts[-1].ended is not None:
        return state
    last = state.attempts[-1].model_copy(update={"ended": how, "last_step": last_step})
    return state.changed(attempts=(*state.attempts[:-1], last))


def _relative(path: Any, run_path: str) -> str | None:
    """Of what lies in the run's directory; other paths stay as they are."""
    if not isinstance(path, str):
        return None
    prefix = run_path.strip("/") + "/"
    return path.lstrip("/").removeprefix(prefix).rstrip("/") if path.lstrip("/").startswith(prefix) else path


def _is_below(path: str) -> bool:
    """Whether it is of the run's directory. What was reported without an upload may lie anywhere."""
    try:
        check_path(path)
    except ValueError:
        return False
    return True


_CHANGES: Mapping[str, Callable[[State, float, Fields], State]] = {
    "persisting": _persist(Status.PENDING),
    "persisted": _persist(Status.COMPLETE),
    "persist_failed": _persist(Status.FAILED),
    "persist_skipped": _persist(Status.FAILED),
    "superfluous": _superfluous,
    "checkpoint_removed": _removed,
    "suspected": _suspected,
    "reported": _reported,
    "decision": _decision,
    "worker_group_failed": _failed,
    "finished": _finished,
}
