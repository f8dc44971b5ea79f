"""Objects that save themselves as files: Orbax's `StatefulCheckpointable`, driven without Orbax.

The files exist for the time of a save or a load, in a temporary directory; in between their bytes are what is kept.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from ray_jax_ckpt.errors import DataStateError
from ray_jax_ckpt.scratch import make_scratch


def saves_files(x: Any) -> bool:
    """Whether an object has Orbax's protocol: coroutine functions `save(directory)` and `load(directory)`."""
    return all(inspect.iscoroutinefunction(getattr(x, name, None)) for name in ("save", "load"))


class Saving:
    """A save under way. The object's state is that of the moment this was made.

    `save` of the protocol does at once what has to be done before the object changes, and returns the rest, an
    awaitable, for the background.
    """

    def __init__(self, x: Any, path: str) -> None:
        self._where = f"data={'' if not path else ' at ' + path} of type {type(x).__name__}"
        self._directory = make_scratch()
        try:
            self._rest: Any = _run(lambda: x.save(_Existing(self._directory)))
        except BaseException:
            self.discard()
            raise

    def files(self, max_bytes: int) -> dict[str, bytes]:
        """Does the rest, in the calling thread, and returns the content of each file by relative path.

        Raises:
            DataStateError: Together they have more than `max_bytes`.
        """
        try:
            self._finish()
            found = sorted(path for path in self._directory.rglob("*") if path.is_file())
            total = sum(path.stat().st_size for path in found)
            if total > max_bytes:
                raise DataStateError(
                    f"{self._where} saved {total} bytes of files; SnapshotConfig.max_data_bytes allows {max_bytes}."
                )
            return {path.relative_to(self._directory).as_posix(): path.read_bytes() for path in found}
        finally:
            self.discard()

    def _finish(self) -> None:
        if not inspect.isawaitable(self._rest):
            return
        try:
            _run(lambda: _awaited(self._rest))
        except Exception as error:
            raise DataStateError(f"{self._where} could not be saved: {error!r}") from error

    def discard(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
        rest = getattr(self, "_rest", None)
        if inspect.iscoroutine(rest):
            # Else a warning says that it was never awaited.
            rest.close()


def load_files(x: Any, files: Mapping[str, bytes]) -> None:
    """Has an object load what it saved. Blocks; everything is done when it returns.

    Raises:
        DataStateError: `files` is not what `Saving.files` returned.
    """
    directory = make_scratch()
    try:
        for name, content in files.items():
            target = directory / _checked(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        _run(lambda: _load(x, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _load(x: Any, directory: Path) -> None:
    rest = await x.load(_epath(directory))
    if inspect.isawaitable(rest):
        await rest


async def _awaited(rest: Awaitable[Any]) -> None:
    await rest


def _checked(name: str) -> PurePosixPath:
    """A name came from storage or a peer: it must not lead out of the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise DataStateError(f"The saved data has a file named {name!r}, which leads out of its directory.")
    return path


class _Existing:
    """Orbax's `PathAwaitingCreation`, of a directory that exists."""

    def __init__(self, path: Path) -> None:
        self.path = _epath(path)

    def __truediv__(self, other: Any) -> _Existing:
        return _Existing(Path(self.path / other))

    async def await_creation(self) -> Any:
        path = Path(self.path)
        path.mkdir(parents=True, exist_ok=True)
        return self.path


def _epath(path: Path) -> Any:
    """What Orbax hands out as paths. Imported here: the process may have nothing to do with such objects."""
    from etils import epath

    return epath.Path(path)


def _run(start: Callable[[], Any]) -> Any:
    """Runs a coroutine to its end; in a thread of its own where an event loop runs already in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    with ThreadPoolExecutor(1, "rjc-data") as threads:
        return threads.submit(lambda: asyncio.run(start())).result()
