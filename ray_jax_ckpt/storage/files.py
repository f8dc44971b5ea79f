"""What filesystems have in common, and where they differ, as far as writing a checkpoint needs it."""

from __future__ import annotations

import errno
import os
import posixpath
import uuid
from typing import Any

import pyarrow.fs

TEMPORARY = ".orbax-checkpoint-tmp"
"""Suffix of a directory that is being written, where it can be renamed. Orbax takes none with it for a checkpoint."""
ASIDE = ".aside"
"""Suffix of a small file that is being written, where it can be renamed."""

_PERMANENT = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)
# pyarrow puts what S3 answered into words only.
_DENIED_WORDS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "EXPIRED_TOKEN",
    "ExpiredToken",
    "HTTP status 403",
)
_PERMANENT_WORDS = (*_DENIED_WORDS, "NO_SUCH_BUCKET")


def renames(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether a directory can be renamed at once, so that others see all of it or nothing.

    Only where that is certain: object stores copy and delete, and what a custom filesystem does is not known.
    """
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        return renames(filesystem.base_fs)
    return isinstance(filesystem, pyarrow.fs.LocalFileSystem)


def is_permanent(error: BaseException) -> bool:
    """Whether trying again soon would fail in the same way: full, read-only, forbidden, not there."""
    if isinstance(error, PermissionError | NotImplementedError | FileExistsError | NotADirectoryError):
        return True
    if not isinstance(error, OSError):
        return True
    return error.errno in _PERMANENT or any(word in str(error) for word in _PERMANENT_WORDS)


def is_denied(error: BaseException) -> bool:
    """Whether storage refuses whoever asks, which new credentials may help."""
    if isinstance(error, PermissionError) or getattr(error, "errno", None) in (errno.EACCES, errno.EPERM):
        return True
    if any(word in str(error) for word in _DENIED_WORDS):
        return True
    # What a writer says of a file names the path, and has the reason as its cause.
    return error.__cause__ is not None and is_denied(error.__cause__)


def for_small_files(filesystem: pyarrow.fs.FileSystem) -> pyarrow.fs.FileSystem:
    """The same filesystem, that takes a small file in one request where it can.

    S3 gets each file as an upload of parts, which is three requests, unless its opening may be delayed. Whoever makes
    the filesystem would have to know that. (Measured: 150 leaves, 50 ms latency, 4 streams: 10 s instead of 19 s.)
    """
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        return pyarrow.fs.SubTreeFileSystem(filesystem.base_path, for_small_files(filesystem.base_fs))
    if not isinstance(filesystem, pyarrow.fs.S3FileSystem):
        return filesystem
    # What pickling keeps of it is all that makes it, but for a strategy of retries, and each file is tried again here.
    make, (options,) = filesystem.__reduce__()
    return make({**options, "allow_delayed_open": True})


def open_output(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    """Opens a file for writing, and makes the directories above it where there are such and they are missing.

    Object stores have none, and get no empty objects that stand for them.
    """
    try:
        return filesystem.open_output_stream(path)
    except FileNotFoundError:
        filesystem.create_dir(posixpath.dirname(path), recursive=True)
        return filesystem.open_output_stream(path)


def write_whole(filesystem: pyarrow.fs.FileSystem, path: str, content: bytes) -> None:
    """Writes a small file so that others, and whoever comes after a crash, see its old content or all of the new one.

    On disks: aside, flushed, and renamed. Object stores take it in one request, and have it or have it not.

    Raises:
        OSError: It is as it was.
    """
    if not renames(filesystem):
        with open_output(for_small_files(filesystem), path) as stream:
            stream.write(content)
        return
    # A name of its own: two drivers may write at once, and only whole files may meet.
    aside = f"{path}.{uuid.uuid4().hex[:8]}{ASIDE}"
    try:
        with open_output(filesystem, aside) as stream:
            stream.write(content)
        _flush(filesystem, aside)
        filesystem.move(aside, path)
    except BaseException:
        remove_file(filesystem, aside)
        raise
    _flush(filesystem, posixpath.dirname(path))


def _flush(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """What a power failure must not undo. Filesystems that cannot do it are taken as they are."""
    while isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        path, filesystem = posixpath.join(filesystem.base_path, path.lstrip("/")), filesystem.base_fs
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def exists(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Whether there is a file or a directory."""
    return filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound


def remove_tree(filesystem: pyarrow.fs.FileSystem, path: str, *, first: str | None = None) -> None:
    """Removes a directory with all that is in it. It need not be there.

    Args:
        filesystem: Where.
        path: The directory.
        first: A file in it that goes before the others: with the manifest gone, a removal that is cut short leaves no
            checkpoint that looks whole.
    """
    if first is not None:
        remove_file(filesystem, f"{path}/{first}")
    try:
        filesystem.delete_dir(path)
    except FileNotFoundError:
        return
    except NotImplementedError:
        for info in filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True, allow_not_found=True)):
            if info.type == pyarrow.fs.FileType.File:
                remove_file(filesystem, info.path)


def remove_file(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Removes a file. It need not be there."""
    try:
        filesystem.delete_file(path)
    except FileNotFoundError:
        return
    except OSError:
        # Some say so in other words.
        if exists(filesystem, path):
            raise
