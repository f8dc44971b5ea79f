"""What is known of a run's checkpoints: which are on their way, which can be restored, which are to go."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How far a checkpoint has come.

    Attributes:
        PENDING: It is being written.
        VALIDATING: It is written, and being validated.
        COMPLETE: It is written; nobody asked for a validation.
        VALIDATED: It is written, and has passed its validation.
        FAILED: It could not be written.
        TIMED_OUT: It was not written in time.
        INVALID: It is written, and its validation failed.
        VALIDATION_TIMED_OUT: It is written, and was not validated in time.
        LOST: It was written, and is not there any more, or not as it was written.
    """

    PENDING = "pending"
    VALIDATING = "validating"
    COMPLETE = "complete"
    VALIDATED = "validated"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INVALID = "invalid"
    VALIDATION_TIMED_OUT = "validation_timed_out"
    LOST = "lost"

    @property
    def is_pending(self) -> bool:
        """Whether something is still to come: nobody removes it."""
        return self in (Status.PENDING, Status.VALIDATING)

    @property
    def is_verified(self) -> bool:
        """Whether nothing is to come, and it can be restored: only such ones count among those that are kept."""
        return self in (Status.COMPLETE, Status.VALIDATED)

    @property
    def is_restorable(self) -> bool:
        """Whether all of it is on storage, and nothing speaks against it."""
        return self.is_verified or self is Status.VALIDATING
