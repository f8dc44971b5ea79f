"""What a user may set."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ray_jax_ckpt.errors import ConfigError

ResumeMode = Literal["auto", "never", "must"]
"""What becomes of a run that has been there before. See `CheckpointManager`."""


def positive_s(timeout_s: Any) -> float:
    """A `timeout_s` as a caller gave it. Raises ConfigError if it is no positive number of seconds."""
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s takes a positive number of seconds, or None for the default: got {timeout_s!r}.")
    return timeout_s


class _Settings(BaseModel):
    """Frozen settings whose errors say in words which one is wrong, and what is nearest to a name that does not exist.

    Raises:
        ConfigError: A name does not exist, or a value cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # True is 1 to pydantic, and no number to whoever wrote it.
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {wanted, *get_args(wanted)}:
            raise ValueError("should be a number, and no bool")
        return value

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("\n".join(self._say(detail) for detail in error.errors())) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"{type(self).__name__} cannot be changed; make another one: model_copy(update={{...}}).")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Any:
        """A copy with some settings changed, checked like a new one."""
        return type(self)(**{**dict(self), **(update or {})})

    @classmethod
    def _say(cls, detail: Any) -> str:
        name = ".".join(map(str, detail["loc"])) or "settings"
        if detail["type"] != "extra_forbidden":
            said = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            return f"{cls.__name__}({name}={detail['input']!r}): {said}."
        near = [one for one in cls.model_fields if one.startswith(f"{name}_")][:1] or difflib.get_close_matches(
            name, cls.model_fields, 1, 0.5
        )
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(cls.model_fields)}."
        return f"{cls.__name__} has no setting {name!r}; {known}"


class TlsConfig(_Settings):
    """Certificates with which snapshots travel encrypted between nodes.

    The files are PEM, read on every node when a store or a worker starts: the same paths everywhere, each node with a
    certificate of its own or all with one. They are tried out then, and a `ConfigError` says what is wrong.

    Attributes:
        certificate: This node's certificate, with the intermediate ones behind it.
        private_key: Its key, not encrypted.
        ca: The certificates that peers' ones have to be signed by.
        mutual: Whether callers have to show a certificate too, so that nobody without one gets as far as to be asked
            for the run's secret.
        server_name: A name that all certificates hold. None: each holds its node's IP address.
    """

    certificate: str
    private_key: str
    ca: str
    mutual: bool = True
    server_name: str | None = Field(default=None, min_length=1)

    @field_validator("certificate", "private_key", "ca")
    @classmethod
    def _absolute(cls, path: str) -> str:
        # Stores and workers run in other directories than the driver.
        if not os.path.isabs(path):
            raise ValueError(f"must be an absolute path, the same on every node, got {path!r}")
        return path


class SnapshotConfig(_Settings):
    """How often, how widely and at what cost training state is kept in memory.

    Attributes:
        every_n_steps: `snapshot(step, ...)` is due when `step` is a multiple of this. Other calls return None at once.
        copies: Copies of every shard, each in another failure domain. 1 survives the death of worker processes, 2 also
            that of a node (or of one whole failure domain).
        max_bytes: Upper limit, per node, of the memory that stores and staging may take. None: what the node has.
        max_data_bytes: Upper limit of what one process's `data` may take, files of objects that save themselves as
            files included. Larger ones are refused.
        on_busy: What a due snapshot does while the previous one still occupies the pipeline: "wait" blocks the training
            thread (at most `timeout_s`), "skip" returns None. After a skipped one every rank waits until a generation
            is complete again, so that ranks skipping in turns cannot starve the run of snapshots.
        timeout_s: Bound, in seconds, of every wait of the train-function calls that take no `timeout_s` of their own.
        staging: What a train step that donates its state waits for after a snapshot. "host": until the state has left
            the device. "device": only for a copy on the device, which then leaves it while training goes on; it takes
            as much device memory as the state (what this process stores of it) until it has left. With too little
            memory for that the snapshots go on as with "host", with one warning. The first snapshot of a tree
            structure goes as with "host" too, while the copy is compiled.
        verify: Digest every shard at capture, and check it on receipt and before a restore.
        orphan_timeout_s: A store ends itself so many seconds after the last sign of life of its run's controller. It
            bounds how long memory stays occupied after a SIGKILLed driver, and how long a new driver with the same run
            can take over.
        failure_domain: What fails together. "auto": TPU slices where Ray labels them, when there are at least `copies`,
            else nodes. "node": nodes. Anything else: the key of a Ray node label.
        streams: Connections that one large transfer between nodes is spread over, at most, when a store copies to a
            peer as well as when a worker restores; small ones use fewer. More help where one core cannot keep the
            network busy, and cost that many more cores while bytes travel. Copies to peers, beside which training goes
            on, use no more than a quarter of a node's cores.
        reject_nonfinite: Keep a state with NaN or infinity in a floating leaf out of what can be restored: its snapshot
            is abandoned, on all ranks, with a warning that names leaves and rank, and the one before stays. It costs a
            pass over the bytes in the background.
        scrub_interval_s: Seconds between two looks of a store at all that it holds, to find bytes that memory has lost:
            what is bad is replaced by a good copy. A look takes at most about 1 % of a core. None: never.
        tls: Certificates for what travels between nodes. None: it travels unencrypted.
        on_replica_mismatch: What happens when ranks that hold replicas of a shard captured different bytes. "warn": the
            lowest rank's count for all, and a warning names the leaves and ranks. "reject": the snapshot is abandoned.
    """

    every_n_steps: int = Field(default=10, ge=1)
    copies: int = Field(default=2, ge=1)
    max_bytes: int | None = Field(default=None, gt=0)
    max_data_bytes: int = Field(default=2**28, gt=0)
    on_busy: Literal["wait", "skip"] = "wait"
    timeout_s: float = Field(default=120.0, gt=0)
    staging: Literal["host", "device"] = "host"
    verify: bool = True
    orphan_timeout_s: float = Field(default=600.0, gt=0)
    failure_domain: str = Field(default="auto", min_length=1)
    streams: int = Field(default=4, ge=1)
    reject_nonfinite: bool = False
    scrub_interval_s: float | None = Field(default=600.0, gt=0)
    tls: TlsConfig | None = None
    on_replica_mismatch: Literal["warn", "reject"] = "warn"


class PersistConfig(_Settings):
    """When snapshots are written to storage, by the stores that hold them, and what is kept there.

    No call in the training loop is needed, and no training process takes part. What is due is the newest complete
    snapshot: one is written at a time, and one that could not be, because the one before was still on its way, is
    replaced by a newer one. The last complete snapshot of a run that ends is due whenever there is a cadence.

    Attributes:
        every_n_steps: A snapshot is due when a multiple of this has been passed since the last one that was. Best a
            multiple of `SnapshotConfig.every_n_steps`. None: steps do not count.
        every_s: A snapshot is due so many seconds after the last one was. None: time does not count.
        num_to_keep: How many checkpoints stay: the best by `score_attribute`, or the newest. The newest always stays,
            beside the best if it is none of them. None: all.
        score_attribute: Name, or path such as "eval.loss", of the metric, as given to `snapshot(metrics=...)` on rank
            0, that says which checkpoints are the best. Ones that lack it, or have no finite number there, rank worst.
            None: the newest are the best.
        score_order: Whether "max" or "min" of it is best.
        keep_every_n_steps: Checkpoints at multiples of this stay for ever, and do not count in `num_to_keep`.
        on_failure: Write the newest complete snapshot whenever a worker group fails, from the stores that live, while
            the next group starts.
        on_preemption: Write the snapshot that is taken because nodes are going to be preempted.
        max_concurrent: Files that one store writes at a time.
        max_bandwidth_bytes_per_s: Upper limit of what one store writes. None: none.
        retries: Further tries for each file that cannot be written, after growing and varying pauses. What trying again
            cannot help (full, read-only, forbidden) is not tried again.
        timeout_s: Bound, in seconds, of writing one checkpoint. What is not finished by then counts as failed.
        fail_after: So many failures in a row fail the run. None: training never fails because of storage; each failure
            is a warning and an event.
    """

    every_n_steps: int | None = Field(default=None, ge=1)
    every_s: float | None = Field(default=None, gt=0)
    num_to_keep: int | None = Field(default=None, ge=1)
    score_attribute: str | None = Field(default=None, min_length=1)
    score_order: Literal["max", "min"] = "max"
    keep_every_n_steps: int | None = Field(default=None, ge=1)
    on_failure: bool = True
    on_preemption: bool = True
    max_concurrent: int = Field(default=4, ge=1)
    max_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    retries: int = Field(default=5, ge=0)
    timeout_s: float = Field(default=1800.0, gt=0)
    fail_after: int | None = Field(default=None, ge=1)

    @property
    def has_cadence(self) -> bool:
        """Whether anything is written without a failure or a preemption."""
        return self.every_n_steps is not None or self.every_s is not None
