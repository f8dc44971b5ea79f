"""What stores say to each other over Arrow Flight: messages, their checks, proofs of the secret, and errors as text.

Everything that comes from a socket is JSON that is checked against a strict model, or raw bytes. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ray_jax_ckpt import errors

# Sums of two stay below 2**63, so that no arithmetic on checked numbers leaves what numpy and Arrow can address.
_Size = Annotated[int, Field(ge=0, lt=2**62)]
_Name = Annotated[str, Field(max_length=1024)]
AUTH_HEADER = "authorization"
PLAIN_SCHEME, TLS_SCHEME = "grpc+tcp", "grpc+tls"

_MAX_RANGES = 1_000_000
_MAX_BANDS = 256
_MAX_ERROR_CHARS = 2000  # gRPC drops calls with trailers above 8 KiB
_CONFIG = ConfigDict(extra="forbid")

_T = TypeVar("_T")

Band = tuple[_Size, _Size]
"""Offset and size of what one stream of a push brings."""


@dataclass(frozen=True)
class PartSpan:
    """A part's place in a push: its id, its offset in the receiver's buffer, and its size."""

    id: _Name
    offset: _Size
    nbytes: _Size

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class PushHeader:
    """What a push brings. Plain data; it travels as JSON before the bytes.

    Attributes:
        attempt: The sender's attempt.
        generation: Opaque name of the generation.
        source: Name of the sending store.
        parts: The parts' places. They do not overlap.
        total_bytes: Size of the buffer. The bytes are sent in order, gaps included.
        meta: Opaque text that goes with it, such as the index of the parts.
        digests: (offset, nbytes, digest) of pieces of the buffer, without overlap, to be verified on receipt. What no
            entry covers is not verified.
    """

    attempt: _Size
    generation: _Name
    source: _Name
    parts: Annotated[tuple[PartSpan, ...], Field(max_length=_MAX_RANGES)]
    total_bytes: _Size
    meta: str = ""
    digests: Annotated[tuple[tuple[_Size, _Size, _Name], ...], Field(max_length=_MAX_RANGES)] = ()

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def check(self) -> None:
        """Raises StoreError unless all parts and digests lie in the buffer, apart from each other."""
        _check_apart([(part.offset, part.nbytes) for part in self.parts], self.total_bytes, "parts")
        _check_apart([(offset, nbytes) for offset, nbytes, _ in self.digests], self.total_bytes, "digests")


@dataclass(frozen=True)
class PushRequest:
    """The first message of a push: the header and a fresh nonce that the receiver answers with its proof.

    Attributes:
        nonce: New for each push; streams that join it name it.
        header: What is pushed.
        bands: Offset and size of what each of several streams brings; empty: this one brings all.
    """

    nonce: _Name
    header: PushHeader
    bands: Annotated[tuple[Band, ...], Field(max_length=_MAX_BANDS)] = ()

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    @property
    def all_bands(self) -> tuple[Band, ...]:
        """What each stream brings."""
        return self.bands or ((0, self.header.total_bytes),)

    def to_json(self) -> bytes:
        """The request as `from_json` reads it."""
        return _REQUEST.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> PushRequest:
        """Reads and checks a request. Raises StoreError if it is malformed."""
        request = _parse(_REQUEST, text, "push request")
        request.header.check()
        _check_bands(request.all_bands, request.header)
        return request


@dataclass(frozen=True)
class JoinRequest:
    """The first message of another stream of a push: the push's nonce, and which of its bands this stream brings."""

    nonce: _Name
    band: _Size

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def to_json(self) -> bytes:
        """The request as `from_json` reads it."""
        return _JOIN.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> JoinRequest:
        """Reads and checks a request. Raises StoreError if it is malformed."""
        return _parse(_JOIN, text, "request to join a push")


@dataclass(frozen=True)
class FetchTicket:
    """What a fetch asks for: (generation, part, offset, nbytes) each; their bytes come concatenated in this order."""

    nonce: _Name
    ranges: Annotated[tuple[tuple[_Name, _Name, _Size, _Size], ...], Field(max_length=_MAX_RANGES)]
    verify: bool = True

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def to_json(self) -> bytes:
        """The ticket as `from_json` reads it."""
        return _TICKET.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> FetchTicket:
        """Reads and checks a ticket. Raises StoreError if it is malformed."""
        return _parse(_TICKET, text, "ticket")


_REQUEST = TypeAdapter(PushRequest)
_JOIN = TypeAdapter(JoinRequest)
_TICKET = TypeAdapter(FetchTicket)


def call_token(secret: str, address: str) -> str:
    """What a caller sends to the store at `address`. The secret itself never travels.

    It depends on the address, so that whoever took over a dead store's port learns nothing that another store accepts.
    """
    return _mac(secret, f"call {address}")


def is_encrypted(address: str) -> bool:
    """Whether a store's address says that it speaks TLS."""
    return address.startswith(f"{TLS_SCHEME}://")


def server_proof(secret: str, address: str, nonce: str) -> str:
    """What a store answers before it gets or gives bytes, so that callers neither send to nor believe an impostor."""
    return _mac(secret, f"serve {address} {nonce}")


def same(ours: str, theirs: str) -> bool:
    """Whether two secrets-derived strings are equal, in constant time. `theirs` may hold anything."""
    return hmac.compare_digest(ours.encode(), theirs.encode(errors="replace"))


def error_to_text(error: Exception) -> str:
    """An exception as text that `error_from_text` turns back into one of this package's."""
    kind = type(error).__name__ if isinstance(error, errors.CheckpointError) else "StoreError"
    text = str(error) if isinstance(error, errors.CheckpointError) else f"{type(error).__name__}: {error}"
    return f"<rjc {kind}>{text[:_MAX_ERROR_CHARS].replace('</', '<')}</rjc>"


def error_from_text(text: str) -> tuple[type[errors.CheckpointError], str]:
    """Class and message of the error that a peer reported; StoreError if it is no error of ours."""
    found = re.search(r"<rjc (\w+)>(.*?)</rjc>", text, re.DOTALL)
    kind = getattr(errors, found.group(1), None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, errors.CheckpointError)):
        return errors.StoreError, text.split(". gRPC client debug context")[0]
    return kind, found.group(2)


def _mac(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def _parse(adapter: TypeAdapter[_T], text: bytes, what: str) -> _T:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(key) for key in first["loc"])
        raise errors.StoreError(f"malformed {what}: {where}: {first['msg']}") from None


def _check_apart(pieces: list[tuple[int, int]], total: int, what: str) -> None:
    end = 0
    for offset, nbytes in sorted(pieces):
        if offset < end or offset + nbytes > total:
            raise errors.StoreError(f"malformed push header: {what} overlap or exceed {total} bytes at offset {offset}")
        end = offset + nbytes


def _check_bands(bands: tuple[Band, ...], header: PushHeader) -> None:
    """Raises StoreError unless bands follow each other, are all of a push, and cut no digested piece."""
    end = 0
    for offset, nbytes in bands:
        if offset != end:
            raise errors.StoreError(f"malformed push request: a band begins at {offset}, the one before ends at {end}")
        end += nbytes
    if end != header.total_bytes:
        raise errors.StoreError(f"malformed push request: bands of {end} bytes for {header.total_bytes}")
    starts = [offset for offset, _ in bands]
    for offset, nbytes, _ in header.digests:
        if bisect_right(starts, offset) != bisect_left(starts, offset + max(nbytes, 1)):
            raise errors.StoreError(f"malformed push request: a band begins within the piece at {offset}")
