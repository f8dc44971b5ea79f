"""The `ray.train.Checkpoint` objects that stand for snapshots in memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.fs
import ray.train

from ray_jax_ckpt.errors import NoCheckpointError, NotSupportedError, RestoreError
from ray_jax_ckpt.model.shards import Generation


class Files(Protocol):
    """Files of a checkpoint."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by path in the checkpoint."""
        ...

    def read(self, path: str) -> np.ndarray:
        """A file's bytes, uint8. Raises KeyError."""
        ...


class SnapshotCheckpoint(ray.train.Checkpoint):
    """A snapshot held in the memory of the run's stores. `ray_jax_ckpt.restore` reads it, from memory.

    As files it is this rank's share of an Orbax checkpoint, which is what `ray.train.report` copies: the ranks' shares
    together are the checkpoint. `as_directory` and `to_directory` give all of it. Files are read from memory while they
    are copied, and there only as long as the stores have the snapshot: take one that is to be reported with
    `force=True`.

    Attributes:
        generation: Which snapshot.
        step: Its training step.
        metrics: What `snapshot(metrics=...)` was given; of a restored one, this rank's.
    """

    def __init__(
        self,
        generation: Generation,
        metrics: dict[str, Any] | None = None,
        *,
        share: Files | None = None,
        whole: Files | None = None,
    ) -> None:
        path = f"ray_jax_ckpt/memory/{generation}"
        super().__init__(path, filesystem=pyarrow.fs.PyFileSystem(_MemoryFiles(path, generation.step, share)))
        self.generation = generation
        self.step = generation.step
        self.metrics = dict(metrics or {})
        self._whole = whole

    def __getstate__(self) -> dict[str, Any]:
        """Elsewhere it stands for the snapshot, and has no files."""
        return {**self.__dict__, "_whole": None}

    def __repr__(self) -> str:
        return f"SnapshotCheckpoint(step={self.step}, generation={self.generation})"

    def as_directory(self) -> AbstractContextManager[str]:
        """The whole checkpoint in a temporary directory of this node, as Ray's `Checkpoint.as_directory`."""
        return self._all().as_directory()

    def to_directory(self, path: Any = None) -> str:
        """The whole checkpoint in a directory, as Ray's `Checkpoint.to_directory`.

        Without a path that is a temporary directory, `checkpoint_tmp_...`, which is the caller's to remove, as with
        Ray's own; `as_directory` removes it by itself.
        """
        return self._all().to_directory(path)

    def _all(self) -> ray.train.Checkpoint:
        # With an identity of its own: Ray keeps one temporary directory per checkpoint on each node.
        files = _MemoryFiles(self.path, self.step, self._whole)
        return ray.train.Checkpoint(self.path, filesystem=pyarrow.fs.PyFileSystem(files))


class UndecidedCheckpoint(ray.train.Checkpoint):
    """What `get_checkpoint()` returns while it is not known what is restored: using it raises.

    A rank that saw None here, while the others restore, would train on other weights than they do.

    Attributes:
        why: There is none; says it instead.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__("ray_jax_ckpt/undecided", filesystem=pyarrow.fs.PyFileSystem(_Undecided(why)))
        self.why = why

    def as_directory(self) -> Any:
        """Raises RestoreError."""
        raise undecided(self.why)

    def to_directory(self, path: Any = None) -> str:
        """Raises RestoreError."""
        raise undecided(self.why)


def undecided(why: str = "") -> RestoreError:
    """The error for using a checkpoint before there is one, or (`why`) where there has to be one and is none."""
    if why:
        return NoCheckpointError(why)
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


class _MemoryFiles(_Refusing):
    """A read-only filesystem whose only directory is a snapshot."""

    def __init__(self, path: str, step: int, files: Files | None) -> None:
        self._path, self._step, self._files = path, step, files

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MemoryFiles) and (other._path, other._files) == (self._path, self._files)

    def __hash__(self) -> int:
        return hash(self._path)

    def _error(self) -> Exception:
        return NotSupportedError(f"The snapshot of step {self._step} is in memory and can only be read.")

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:
        sizes = self._known().sizes()
        return [self._info(path, sizes) for path in paths]

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> list[pyarrow.fs.FileInfo]:
        sizes, base = self._known().sizes(), self._relative(selector.base_dir)
        prefix = f"{base}/" if base else ""
        below = [name.removeprefix(prefix) for name in sizes if name.startswith(prefix)]
        if not below and not selector.allow_not_found:
            raise FileNotFoundError(f"{selector.base_dir} is not in the snapshot of step {self._step}.")
        names = [name for name in _with_directories(below) if selector.recursive or "/" not in name]
        return [self._info(f"{self._path}/{prefix}{name}", sizes) for name in names]

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        try:
            content = self._known().read(self._relative(path))
        except KeyError:
            raise FileNotFoundError(f"{path} is not in the snapshot of step {self._step}.") from None
        return pa.BufferReader(pa.py_buffer(content))

    def _known(self) -> Files:
        if self._files is None:
            raise NotSupportedError(
                f"The snapshot of step {self._step} has files only in the train function that it was taken in."
            )
        return self._files

    def _relative(self, path: str) -> str:
        return path.rstrip("/").removeprefix(self._path).lstrip("/")

    def _info(self, path: str, sizes: dict[str, int]) -> pyarrow.fs.FileInfo:
        name = self._relative(path)
        if name in sizes:
            return pyarrow.fs.FileInfo(path, type=pyarrow.fs.FileType.File, size=sizes[name])
        is_directory = not name or any(other.startswith(f"{name}/") for other in sizes)
        kind = pyarrow.fs.FileType.Directory if is_directory else pyarrow.fs.FileType.NotFound
        return pyarrow.fs.FileInfo(path, type=kind)


def _with_directories(names: Iterable[str]) -> Iterable[str]:
    """Names of files with those of the directories above them, each once."""
    split = [name.split("/") for name in names]
    return dict.fromkeys("/".join(parts[:depth]) for parts in split for depth in range(1, len(parts) + 1))


class _Undecided(_Refusing):
    def __init__(self, why: str) -> None:
        self._why = why

    def _error(self) -> Exception:
        return undecided(self._why)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Undecided) and other._why == self._why

    def __hash__(self) -> int:
        return 0
