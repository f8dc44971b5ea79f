"""From what a user calls a place on storage to a pyarrow filesystem and a path on it, and its errors in plain words."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from ray_jax_ckpt.errors import CheckpointError, ConfigError, NoCheckpointError, StorageError

Place = tuple[pafs.FileSystem, str]
"""A filesystem and a path on it."""

# AWS's words, as pyarrow passes them on, and what they mean to whoever gave the path.
_MEANINGS = {
    "NO_SUCH_BUCKET": "There is no such bucket, or not in this region or at this endpoint.",
    "NoSuchBucket": "There is no such bucket, or not in this region or at this endpoint.",
    "INVALID_ACCESS_KEY_ID": "The storage does not know the access key.",
    "InvalidAccessKeyId": "The storage does not know the access key.",
    "SIGNATURE_DOES_NOT_MATCH": "The secret key does not belong to the access key.",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key.",
    "ACCESS_DENIED": "The credentials do not allow it, or there are none.",
    "AccessDenied": "The credentials do not allow it, or there are none.",
    "NETWORK_CONNECTION": "The endpoint cannot be reached.",
}


def is_place(where: Any) -> bool:
    """Whether `resolve` takes it, as far as its type tells."""
    if isinstance(where, tuple):
        return len(where) == 2 and isinstance(where[0], str | os.PathLike) and _is_filesystem(where[1])
    return _is_checkpoint(where) or isinstance(where, str | os.PathLike)


def resolve(where: Any, filesystem: Any = None) -> Place:
    """The filesystem and path of a place. Asks no storage whether something is there.

    Args:
        where: A path (a relative one is below the working directory), a URI (of pyarrow's or fsspec's; for S3 also
            `s3://bucket/path?endpoint_override=http://host:port`), a pair of path and filesystem, or anything with
            these as attributes `path` and `filesystem`, as a `ray.train.Checkpoint` has.
        filesystem: Of pyarrow or fsspec, for a path on it. What `where` says of one counts less.

    Raises:
        ConfigError: It is none of these, or there is no filesystem of that name.
    """
    if not is_place(where):
        raise ConfigError(
            f"{where!r:.200} is no place on storage. Give a path, a URI, a (path, filesystem) pair, or a "
            "ray.train.Checkpoint."
        )
    own = None
    if isinstance(where, tuple):
        where, own = where
    elif _is_checkpoint(where):
        where, own = where.path, where.filesystem
    filesystem, path = own if filesystem is None else filesystem, os.fspath(where)
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where!r} is no path on storage.")
    if filesystem is not None:
        return _on(_wrapped(filesystem), path)
    return _from_uri(path) if "://" in path else (pafs.LocalFileSystem(), _absolute(path))


def with_names(infos: Iterable[pafs.FileInfo]) -> Iterator[pafs.FileInfo]:
    """Those of what was listed that have names which can be read. What has none is none of this package's or Ray's."""
    for info in infos:
        try:
            info.path  # noqa: B018
        except UnicodeDecodeError:
            continue
        yield info


def directory_names(filesystem: pafs.FileSystem, path: str) -> list[str]:
    """Names of the directories in a directory, which need not be there. Raises OSError."""
    infos = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
    # Of some filesystems paths end with a slash, and such a path has no base name.
    paths = (info.path for info in with_names(infos) if info.type == pafs.FileType.Directory)
    return [path.rstrip("/").rpartition("/")[2] for path in paths]


def describe(filesystem: pafs.FileSystem, path: str) -> str:
    """A place in words, for messages. Holds no credentials."""
    return path if isinstance(filesystem, pafs.LocalFileSystem) else f"{path} ({filesystem.type_name} filesystem)"


def join(path: str, *names: str) -> str:
    """A path below another one."""
    return "/".join([path.rstrip("/"), *names]) if path.rstrip("/") else "/".join([path + names[0], *names[1:]])


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what a filesystem raises while something is read into this package's errors.

    Args:
        what: What is read from where; begins the message.

    Raises:
        NoCheckpointError: It is not there.
        StorageError: The filesystem failed otherwise.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise NoCheckpointError(f"{what}: there is no such file or directory. ({error})") from error
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{what} failed: {_meaning(error)}{error}") from error


def is_final(error: Exception) -> bool:
    """Whether asking once more cannot help: what is asked for is forbidden, or addressed wrongly."""
    return any(code in str(error) for code in _MEANINGS if code != "NETWORK_CONNECTION")


def _meaning(error: Exception) -> str:
    text = str(error)
    return next((f"{words} " for code, words in _MEANINGS.items() if code in text), "")


def _is_checkpoint(x: Any) -> bool:
    # Not by being no path: Ray's has `__fspath__`, to say that it is none.
    return isinstance(getattr(x, "path", None), str) and _is_filesystem(getattr(x, "filesystem", None))


def _is_filesystem(x: Any) -> bool:
    return isinstance(x, pafs.FileSystem) or _is_fsspec(x)


def _is_fsspec(x: Any) -> bool:
    return any(f"{c.__module__}.{c.__name__}" == "fsspec.spec.AbstractFileSystem" for c in type(x).__mro__)


def _wrapped(filesystem: Any) -> pafs.FileSystem:
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    if _is_fsspec(filesystem):
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    raise ConfigError(f"filesystem= takes one of pyarrow or fsspec, got {type(filesystem)}.")


def _on(filesystem: pafs.FileSystem, path: str) -> Place:
    """A path on a given filesystem, from which a URI differs by its scheme and query."""
    if "://" in path:
        path = path.split("://", 1)[1].split("?", 1)[0]
    is_local = isinstance(filesystem, pafs.LocalFileSystem)
    return filesystem, _absolute(path) if is_local else path.rstrip("/") or path


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _from_uri(uri: str) -> Place:
    uri = _plain_endpoint(uri)
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid as error:
        if "Unrecognized filesystem type" in str(error):
            return _from_fsspec(uri)
        raise ConfigError(f"{uri} is no URI of a filesystem: {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{uri} cannot be opened: {_meaning(error)}{error}") from error
    return filesystem, path.rstrip("/") or path


def _plain_endpoint(uri: str) -> str:
    """Pyarrow wants the endpoint of an S3 store without its scheme, which is a parameter of its own."""
    parts = urllib.parse.urlsplit(uri)
    query = dict(urllib.parse.parse_qsl(parts.query))
    scheme, found, host = query.get("endpoint_override", "").partition("://")
    if parts.scheme != "s3" or not found:
        return uri
    query = {"scheme": scheme} | query | {"endpoint_override": host.rstrip("/")}
    return urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(query)))


def _from_fsspec(uri: str) -> Place:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{uri}: neither pyarrow nor fsspec has a filesystem for it: {error}") from error
    return _wrapped(filesystem), path.rstrip("/") or path
