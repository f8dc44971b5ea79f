"""What describes arrays is looked at before tensorstore reads it, which takes any size, and ends at a deep nesting.

tensorstore 0.1.86 reads such a file whole, and one that is nested a million deep ends the process.
"""

from __future__ import annotations

import os

from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.storage.manifest import parse_object

DATABASE = "manifest.ocdbt"
MAX_BYTES = 16 << 20
NAMES = {"zarr": ".zarray", "zarr3": "zarr.json"}
"""Of the file, or entry of a database, that describes an array, by driver."""


def is_description(path: str) -> bool:
    """Whether a file describes an array or a database."""
    return path.rpartition("/")[2] in (DATABASE, *NAMES.values())


def check_size(size: int, where: str) -> None:
    """Raises IntegrityError if a description has more than is read of one."""
    if size > MAX_BYTES:
        raise IntegrityError(f"{where} has {size} bytes, and {MAX_BYTES} are read at most.")


def check(raw: bytes, where: str) -> None:
    """Raises IntegrityError if a description cannot be given to tensorstore."""
    check_size(len(raw), where)
    if not where.endswith(DATABASE):
        parse_object(raw, where)


def check_file(path: str) -> None:
    """As `check`, of a local file. It need not be there."""
    if not os.path.isfile(path):
        return
    check_size(os.path.getsize(path), path)
    if not path.endswith(DATABASE):
        with open(path, "rb") as file:
            check(file.read(MAX_BYTES + 1), path)
