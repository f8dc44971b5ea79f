"""The `ray.train.Checkpoint` objects that stand for snapshots in memory."""

from __future__ import annotations

from typing import Any

import pyarrow.fs
import ray.train

from ray_jax_ckpt.errors import NotSupportedError, RestoreError
from ray_jax_ckpt.model.shards import Generation


class SnapshotCheckpoint(ray.train.Checkpoint):
    """A snapshot held in the memory of the run's stores. `ray_jax_ckpt.restore` reads it.

    It has no files: `as_directory`, `to_directory`, and giving it to `ray.train.report`, raise `NotSupportedError`.

    Attributes:
        generation: Which snapshot.
        step: Its training step.
        metrics: What `snapshot(metrics=...)` was given; of a restored one, this rank's.
    """

    def __init__(self, generation: Generation, metrics: dict[str, Any] | None = None) -> None:
        path = f"ray_jax_ckpt/memory/{generation}"
        super().__init__(path, filesystem=pyarrow.fs.PyFileSystem(_NoFiles(generation.step)))
        self.generation = generation
        self.step = generation.step
        self.metrics = dict(metrics or {})

    def __repr__(self) -> str:
        return f"SnapshotCheckpoint(step={self.step}, generation={self.generation})"

    def as_directory(self) -> Any:
        """Raises NotSupportedError."""
        raise no_files(self.step)

    def to_directory(self, path: Any = None) -> str:
        """Raises NotSupportedError."""
        raise no_files(self.step)


class UndecidedCheckpoint(ray.train.Checkpoint):
    """What `get_checkpoint()` returns while it is not known what is restored: using it raises.

    A rank that saw None here, while the others restore, would train on other weights than they do.
    """

    def __init__(self) -> None:
        super().__init__("ray_jax_ckpt/undecided", filesystem=pyarrow.fs.PyFileSystem(_Undecided()))

    def as_directory(self) -> Any:
        """Raises RestoreError."""
        raise undecided()

    def to_directory(self, path: Any = None) -> str:
        """Raises RestoreError."""
        raise undecided()


def no_files(step: int) -> NotSupportedError:
    """The error for reading a snapshot as files."""
    return NotSupportedError(
        f"The snapshot of step {step} is in memory and has no files: this version restores it with "
        f"ray_jax_ckpt.restore() "
        "only. To keep a checkpoint on storage, save the state with Orbax and report that directory."
    )


def undecided() -> RestoreError:
    """The error for using a checkpoint before there is one."""
    return RestoreError(
        "What this worker group restores could not be decided in time (the manager's log says why). Failing this "
        "attempt, so that the next one decides again, instead of training from the wrong state."
    )


class _Refusing(pyarrow.fs.FileSystemHandler):
    """A filesystem on which everything raises `self._error()`."""

    def _error(self) -> Exception:
        raise NotImplementedError

    def get_type_name(self) -> str:
        return "ray_jax_ckpt"

    def normalize_path(self, path: str) -> str:
        return path

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    get_file_info = get_file_info_selector = create_dir = delete_dir = delete_dir_contents = _refuse
    delete_root_dir_contents = delete_file = move = copy_file = _refuse
    open_input_stream = open_input_file = open_output_stream = open_append_stream = _refuse


class _NoFiles(_Refusing):
    def __init__(self, step: int) -> None:
        self._step = step

    def _error(self) -> Exception:
        return no_files(self._step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoFiles) and other._step == self._step

    def __hash__(self) -> int:
        return hash(self._step)


class _Undecided(_Refusing):
    def _error(self) -> Exception:
        return undecided()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Undecided)

    def __hash__(self) -> int:
        return 0
