"""What is known of a run, as its state file holds it: versioned, with paths relative to the run's directory."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_serializer, field_validator
from pydantic_core import PydanticSerializationError

from ray_jax_ckpt.errors import NotSupportedError, StateError
from ray_jax_ckpt.model import metrics as metrics_
from ray_jax_ckpt.model.results import Status
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.manifest import check_path, parse_object
from ray_jax_ckpt.storage.migrations import MIGRATIONS, is_of_ray

VERSION = 1
MAX_STATE_BYTES = 256 << 20
MAX_ATTEMPTS = 32
"""So many attempts are remembered."""

GONE = "it is gone"
"""Why a checkpoint is lost that is not there any more."""

Origin = Literal["persist", "report"]
Tier = Literal["memory", "storage", "ray"]


class _Model(BaseModel):
    """Frozen. Fields that are not known here are passed over: another build of the same version may have them."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Driver(_Model):
    """Who runs, or ran last.

    Attributes:
        id: Another one for each start of a controller.
        host: Name of its machine.
        pid: Its process id there.
        job_id: Ray's.
        started_at_s: Unix time. Later than that of whom it took over from, whatever the clocks say.
    """

    id: str
    host: str = ""
    pid: int = 0
    job_id: str = ""
    started_at_s: float = 0.0


class AttemptRecord(_Model):
    """One start of a worker group.

    Attributes:
        attempt: Its number.
        step: What it restored; None: nothing.
        generation: The same, as `str(Generation)`; None also if that is not known.
        tier: Where from: "memory", "storage", or "ray" for what was reported.
        path: Of the checkpoint, relative to the run's directory, or as it was given if it lies elsewhere.
        started_at_s: Unix time.
        ended: How; None: it goes on, or nobody was left to say.
        last_step: The newest complete step when it ended.
    """

    attempt: NonNegativeInt
    step: NonNegativeInt | None = None
    generation: str | None = None
    tier: Tier | None = None
    path: str | None = None
    started_at_s: float = 0.0
    ended: Literal["failed", "finished"] | None = None
    last_step: NonNegativeInt | None = None


class Record(_Model):
    """A checkpoint.

    Attributes:
        path: Of its directory, relative to the run's.
        generation: As `str(Generation)`; None: it is not known, or none of this package's.
        step: The training step, if known.
        report_index: Which report it came with; None: with none.
        status: How far it has come.
        reason: Why it is no better than that.
        origin: "persist": the stores wrote it. "report": Ray did, for `ray.train.report`.
        metrics: Of rank 0, or as Ray has them.
        created_at_s: Unix time.
        num_bytes: Of its files, if known.
        validation: What its report said of how it is to be validated, as Ray has it: True, or a dictionary.
    """

    path: str
    generation: str | None = None
    step: NonNegativeInt | None = None
    report_index: NonNegativeInt | None = None
    status: Status = Status.COMPLETE
    reason: str = ""
    origin: Origin = "persist"
    metrics: dict[str, Any] = {}
    created_at_s: float = 0.0
    num_bytes: NonNegativeInt | None = None
    validation: Any = None

    @field_validator("path")
    @classmethod
    def _stays_below(cls, path: str) -> str:
        return check_path(path)

    @field_validator("generation")
    @classmethod
    def _is_generation(cls, text: str | None) -> str | None:
        if text is not None:
            Generation.parse(text)
        return text

    @field_serializer("metrics", when_used="json")
    def _encoded(self, found: dict[str, Any]) -> Any:
        return metrics_.encode(found)


class State(_Model):
    """What is known of a run.

    Attributes:
        version: Of this layout.
        run: Name of the run.
        driver: Who wrote it; None: nobody who runs anything.
        finished_at_s: When the run ended well; None: it did not.
        report_index: Reports so far, over all worker groups and drivers.
        attempts: The last `MAX_ATTEMPTS`, oldest first.
        checkpoints: In no order that means anything.
        removing: Paths, relative to the run's directory, of what is not listed any more and may not be gone yet.
        first_attempt: Of the run as this driver started it anew; nothing of earlier ones is restored. 0: it did not.
    """

    version: int = VERSION
    run: str = ""
    driver: Driver | None = None
    finished_at_s: float | None = None
    report_index: NonNegativeInt = 0
    attempts: tuple[AttemptRecord, ...] = ()
    checkpoints: tuple[Record, ...] = ()
    removing: tuple[str, ...] = ()
    first_attempt: NonNegativeInt = 0

    @field_validator("attempts")
    @classmethod
    def _newest_only(cls, attempts: tuple[AttemptRecord, ...]) -> tuple[AttemptRecord, ...]:
        return attempts[-MAX_ATTEMPTS:]

    @field_validator("removing")
    @classmethod
    def _stay_below(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_path, paths))

    def changed(self, **fields: Any) -> State:
        """A copy with other fields, checked. Never longer than what is kept."""
        return State(**{**{name: getattr(self, name) for name in type(self).model_fields}, **fields})

    def taken_over(self, driver: Driver) -> State:
        """The same run with a new driver, which counts as later than the one before whatever the clocks say.

        What was being written has come to nothing: nobody writes it any more, also where the driver is the same and
        its coordinator was killed.
        """
        checkpoints = tuple(map(_orphaned, self.checkpoints))
        if self.driver is not None and self.driver.id == driver.id:
            return self.changed(checkpoints=checkpoints)
        before = 0.0 if self.driver is None else self.driver.started_at_s
        late = driver.model_copy(update={"started_at_s": max(driver.started_at_s, before + 1e-3)})
        return self.changed(driver=late, finished_at_s=None, first_attempt=0, checkpoints=checkpoints)

    def to_bytes(self) -> bytes:
        """JSON. NaN and infinities of metrics are text in it; `parse_state` makes them numbers again."""
        try:
            return self.model_dump_json().encode()
        except PydanticSerializationError:
            # Names of files, and what storage says of them, need not be Unicode.
            return json.dumps(self.model_dump(mode="json")).encode()


def _orphaned(record: Record) -> Record:
    if record.status is not Status.PENDING:
        return record
    return record.model_copy(update={"status": Status.FAILED, "reason": "who had it written has ended"})


def parse_state(raw: bytes, where: str) -> State:
    """Reads a state, of this version or an older one. One that Ray's own manager wrote counts as version 0.

    Raises:
        StateError: It is none, or damaged.
        NotSupportedError: A newer version of this package wrote it.
    """
    if not raw.strip():
        raise StateError(f"{where} is empty.")
    tree = parse_object(raw, where, most_bytes=MAX_STATE_BYTES, error=StateError)
    version = 0 if is_of_ray(tree) else tree.get("version")
    if type(version) is not int or version < 0:
        raise StateError(f"{where} is not the state of a run: it has the version {version!r:.50}.")
    if version > VERSION:
        raise NotSupportedError(
            f"{where} has version {version}, and this ray_jax_ckpt knows versions up to {VERSION}: a newer one has run "
            "here. Install that, or give the run another name=."
        )
    try:
        for older in range(version, VERSION):
            tree = MIGRATIONS[older](tree)
        for record in tree.get("checkpoints", ()):
            record["metrics"] = metrics_.decode(record.get("metrics", {}))
        return State.model_validate({**tree, "version": VERSION})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"])) or "the whole"
        raise StateError(f"{where} is damaged, at {at:.200}: {first['msg']}.") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"{where} is damaged: {type(error).__name__}: {error}.") from None
