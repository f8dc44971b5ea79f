"""Which run this is: the same for every spelling of a storage path, and never the same for two places.

Credentials have no part in it: they may change from one driver to the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow.fs

from ray_jax_ckpt.memory.fleet import run_digest
from ray_jax_ckpt.memory.messages import RunIdentity

# Of what filesystems are made with, where they point to. A bucket has one region, and is reached by either scheme.
_ENDPOINT = ("endpoint_override", "account_name", "blob_storage_authority", "host", "port", "project_id")
# The same of fsspec's.
_FSSPEC_ENDPOINT = ("endpoint_url", "host", "port", "account_name", "project", "base_url", "repo", "org")


def run_identity(filesystem: pyarrow.fs.FileSystem, path: str) -> RunIdentity:
    """The run that has its directory there: the same for every driver, and for every spelling of the path."""
    return RunIdentity(run_digest(*canonical(filesystem, path)), path, filesystem)


def canonical(filesystem: pyarrow.fs.FileSystem, path: str) -> tuple[str, str]:
    """The kind and endpoint of a filesystem, and the one spelling of a path on it.

    On a local disk symbolic links and ".." are followed. A relative path is left as it is: where it leads to depends on
    the process.
    """
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        return canonical(filesystem.base_fs, f"{filesystem.base_path}/{path}")
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return "local", os.path.realpath(path) if os.path.isabs(path) else os.path.normpath(path)
    if isinstance(filesystem, pyarrow.fs.PyFileSystem):
        return _of_handler(filesystem, path)
    return _kind(filesystem.type_name, _made_with(filesystem), _ENDPOINT), _joined(path)


def _of_handler(filesystem: pyarrow.fs.PyFileSystem, path: str) -> tuple[str, str]:
    handler = filesystem.handler
    if not isinstance(handler, pyarrow.fs.FSSpecHandler):
        return filesystem.type_name, _joined(path)
    inner = handler.fs
    protocols = (inner.protocol,) if isinstance(inner.protocol, str) else tuple(inner.protocol)
    if "file" in protocols or "local" in protocols:
        return canonical(pyarrow.fs.LocalFileSystem(), path)
    options = dict(inner.storage_options) | dict(inner.storage_options.get("client_kwargs") or {})
    return _kind(f"fsspec+{protocols[0]}", options, _FSSPEC_ENDPOINT), _joined(path)


def _made_with(filesystem: pyarrow.fs.FileSystem) -> Mapping[str, Any]:
    """What a filesystem pickles as; it has no attributes for most of it."""
    try:
        arguments = filesystem.__reduce__()[1]
    except Exception:
        return {}
    return arguments[0] if arguments and isinstance(arguments[0], dict) else {}


def _kind(name: str, options: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return " ".join([name, *[f"{key}={options[key]}".rstrip("/") for key in keys if options.get(key)]])


def _joined(path: str) -> str:
    """Without slashes that mean nothing. Object stores know no "..": it is a name like any other."""
    return "/".join(part for part in path.split("/") if part)
