"""The user's certificates for the transfer: read, tried out, and put in the words of Arrow Flight."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_jax_ckpt.config import TlsConfig
from ray_jax_ckpt.errors import ConfigError

# A handshake takes two round trips; each turn of the loop is at least half of one.
_MAX_TURNS = 10


@dataclass(frozen=True)
class Tls:
    """Certificates in memory. Never logged: one is a private key.

    Attributes:
        certificate: This node's, PEM.
        private_key: Its key, PEM.
        ca: What signed the peers', PEM.
        mutual: Whether callers too have to show a certificate.
        server_name: The name that is looked for in certificates, "" for the address that was called.
    """

    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    mutual: bool
    server_name: str = ""

    def server_options(self) -> dict[str, Any]:
        """What a `FlightServerBase` takes."""
        options: dict[str, Any] = {"tls_certificates": [(self.certificate, self.private_key)]}
        return options | ({"verify_client": True, "root_certificates": self.ca} if self.mutual else {})

    def client_options(self) -> dict[str, Any]:
        """What a `FlightClient` takes."""
        options: dict[str, Any] = {"tls_root_certs": self.ca}
        if self.server_name:
            options["override_hostname"] = self.server_name
        return options | ({"cert_chain": self.certificate, "private_key": self.private_key} if self.mutual else {})


def load_tls(config: TlsConfig, host: str) -> Tls:
    """Reads the files on this node, and tries them out by a handshake with itself.

    Args:
        config: Where they are.
        host: The address that peers reach this node by.

    Raises:
        ConfigError: A file cannot be read, is no PEM, or peers would refuse this node: file and reason are named.
    """
    names = ("certificate", "private_key", "ca")
    contents = [_read(name, getattr(config, name)) for name in names]
    tls = Tls(*contents, mutual=config.mutual, server_name=config.server_name or "")
    server, client = _contexts(config)
    try:
        _shake_hands(server, client, tls.server_name or host)
    except ssl.SSLError as error:
        name = tls.server_name or host
        raise ConfigError(
            f"TLS: peers would refuse the certificate {config.certificate} of this node when they call it {name!r}: "
            f"{_reason(error)}. It must be signed by {config.ca} and hold {name!r} as a subject alternative name "
            "(for an address an IP entry), or set TlsConfig.server_name to a name that it holds."
        ) from error
    return tls


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"TLS: {name}={path!r} cannot be read: {error.strerror}. It has to be on every node, readable for Ray."
        ) from error


def _contexts(config: TlsConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        try:
            context.load_cert_chain(config.certificate, config.private_key, password=_refuse)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"TLS: certificate {config.certificate} and private_key {config.private_key} do not go together, are "
                f"no PEM files, or the key is encrypted: {_reason(error)}."
            ) from error
        try:
            context.load_verify_locations(config.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"TLS: ca {config.ca} is no PEM file of certificates: {_reason(error)}.") from error
    if config.mutual:
        server.verify_mode = ssl.CERT_REQUIRED
    return server, client


def _refuse() -> str:
    # Without it OpenSSL would ask for the passphrase on the terminal, for ever.
    raise ValueError("encrypted keys are not supported")


def _reason(error: Exception) -> str:
    return str(getattr(error, "verify_message", None) or getattr(error, "reason", None) or error)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A handshake in memory. Raises ssl.SSLError if one side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_TURNS):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
        if not ends:
            return
    raise ssl.SSLError("the handshake did not end")
