"""What stores say to the coordinator's calls for storage, in errors of this package."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError, RayTaskError

from ray_jax_ckpt.errors import CheckpointError, PersistError, SnapshotLostError, StoreError


class GaveWayError(StoreError):
    """An upload that was not begun, or was given up, for the sake of snapshots."""


async def reply(ref: Any) -> Any:
    """A store's answer.

    Raises:
        GaveWayError: It does not hold any more what it was to write.
        CheckpointError: What else the store raised; a PersistError if it is gone.
    """
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SnapshotLostError):
            raise GaveWayError(str(cause)) from None
        raise (cause if isinstance(cause, CheckpointError) else PersistError(str(error))) from None
    except RayError as error:
        raise PersistError(f"a store that was writing is gone: {error}") from error
