"""Digests of snapshot bytes: what was captured is what is restored, or an error says so.

xxh3_64 finds bit flips, torn copies and mixed-up buffers at memory speed. It is no defence against forgery: who may
write at all is decided by the transfer's authentication.
"""

from __future__ import annotations

import numpy as np
import xxhash

_PREFIX = "xxh3:"
# Small enough that the digest reads what the copy has just left in the core's cache, large enough (above xxhash's
# 64 KiB) that both run without the GIL. Of 64 KiB to 16 MiB, 256 KiB to 1 MiB were fastest.
CHUNK_BYTES = 512 << 10


class Digester:
    """A digest that is fed piece by piece. Not thread-safe; large pieces are hashed with the GIL released."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, buffer: np.ndarray | memoryview | bytes) -> None:
        """Feeds a contiguous buffer, as bytes."""
        self._hash.update(buffer.data if isinstance(buffer, np.ndarray) else buffer)

    def result(self) -> str:
        """The digest of everything fed so far, tagged with its algorithm: ``"xxh3:0123456789abcdef"``."""
        return _PREFIX + self._hash.hexdigest()


def digest(buffer: np.ndarray | memoryview | bytes | bytearray) -> str:
    """The digest of a contiguous buffer's bytes, such as ``"xxh3:0123456789abcdef"``.

    Any thread may call it; the GIL is released while it hashes more than 64 KiB. Digests are compared as whole strings,
    so two algorithms never match by accident.

    Raises:
        ValueError: The buffer is not C-contiguous.
    """
    digester = Digester()
    digester.update(as_bytes(buffer))
    return digester.result()


def copy_and_digest(dst: np.ndarray | memoryview, src: np.ndarray | memoryview | bytes, verify: bool) -> str:
    """Copies `src` to `dst` and, if `verify`, digests it on the way. The GIL is released for all but tiny buffers.

    Args:
        dst: Writable contiguous buffer of exactly the bytes of `src`.
        src: Contiguous buffer. It must not overlap `dst`.
        verify: Whether to digest. Copying alone is about twice as fast.

    Returns:
        The digest of the bytes as they are in `dst`, or "" without `verify`.

    Raises:
        ValueError: The sizes differ, or a buffer is not contiguous.
    """
    target, source = as_bytes(dst), as_bytes(src)
    if target.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes into a buffer of {target.nbytes} bytes")
    if not verify:
        np.copyto(target, source)
        return ""
    digester = Digester()
    copy_into_digest(target, source, digester)
    return digester.result()


def copy_into_digest(dst: np.ndarray, src: np.ndarray, digester: Digester) -> None:
    """Like `copy_and_digest` with `verify`, feeding a digest that goes on: both are uint8 arrays of the same length."""
    for start in range(0, src.nbytes, CHUNK_BYTES):
        piece = dst[start : start + CHUNK_BYTES]
        np.copyto(piece, src[start : start + CHUNK_BYTES])
        # The copy is digested, not the source: a source that is overwritten in mid-copy cannot hide a torn copy.
        digester.update(piece)


def as_bytes(buffer: np.ndarray | memoryview | bytes | bytearray) -> np.ndarray:
    """A flat uint8 array over the same memory as a contiguous buffer, without a copy.

    Raises:
        ValueError: The buffer is not C-contiguous.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"not C-contiguous: an array of shape {buffer.shape} with strides {buffer.strides}")
        return buffer.reshape(-1).view(np.uint8)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"not C-contiguous: a buffer of shape {view.shape} with strides {view.strides}")
    return np.frombuffer(view, np.uint8)
