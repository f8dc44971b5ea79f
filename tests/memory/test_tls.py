"""Transfers with certificates: who has none, or one of another authority, is refused on either side."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.flight as fl
import pytest
import trustme
from flight_peer import DATA, SECRET, Shelf, header_of

from ray_jax_ckpt.config import TlsConfig
from ray_jax_ckpt.errors import AuthenticationError, ConfigError, StoreError
from ray_jax_ckpt.memory.tls import Tls, load_tls
from ray_jax_ckpt.memory.transfer import FlightServer, fetch, push

HOST = "127.0.0.1"
Files = Callable[..., TlsConfig]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    """Writes a certificate and what belongs to it."""

    def write(*names: str, ca: trustme.CA = authority, signed_by: trustme.CA = authority, **settings) -> TlsConfig:
        directory = tmp_path / str(len(os.listdir(tmp_path)))
        directory.mkdir()
        issued = signed_by.issue_cert(*(names or (HOST,)), not_after=settings.pop("not_after", None))
        paths = [str(directory / name) for name in ("cert.pem", "key.pem", "ca.pem")]
        Path(paths[0]).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(paths[1])
        ca.cert_pem.write_to_path(paths[2])
        return TlsConfig(certificate=paths[0], private_key=paths[1], ca=paths[2], **settings)

    return write


def exchange(server: FlightServer, shelf: Shelf, tls: Tls | None, secret: str = SECRET) -> None:
    """Bytes in both directions."""
    out = np.zeros(1000, np.uint8)
    fetch(server.address, secret, [("1.0.5", "w", 0, 1000, out)], 10, tls=tls)
    np.testing.assert_array_equal(out, DATA[:1000])
    push(server.address, secret, header_of(DATA[:1000]), [DATA[:1000]], 10, tls=tls)
    np.testing.assert_array_equal(shelf.buffer[:1000], DATA[:1000])


@pytest.mark.parametrize("settings", [{}, {"mutual": False}, {"server_name": "store.example"}])
def test_bytes_travel_both_ways_with_certificates(files: Files, settings: dict) -> None:
    names = [settings["server_name"]] if "server_name" in settings else [HOST]
    tls, shelf = load_tls(files(*names, **settings), HOST), Shelf()
    server = FlightServer(SECRET, shelf, HOST, tls)
    try:
        assert server.address.startswith("grpc+tls://")
        exchange(server, shelf, tls)
        with pytest.raises(AuthenticationError, match="does not accept this run's secret"):
            exchange(server, shelf, tls, "wrong")
    finally:
        server.close()


def test_a_caller_without_a_certificate_of_the_authority_gets_nowhere(files: Files) -> None:
    tls, shelf = load_tls(files(), HOST), Shelf()
    stranger = load_tls(files(ca=(other := trustme.CA()), signed_by=other), HOST)
    server = FlightServer(SECRET, shelf, HOST, tls)
    try:
        # It even believes the server, and knows the secret.
        believer = Tls(stranger.certificate, stranger.private_key, tls.ca, mutual=True)
        anonymous = Tls(b"", b"", tls.ca, mutual=False)
        for caller in (believer, anonymous):
            with pytest.raises(StoreError, match=re.escape(server.address)):
                exchange(server, shelf, caller)
        with pytest.raises(StoreError, match=r"SnapshotConfig\.tls must be the same for all"):
            exchange(server, shelf, None)
        plain = server.address.replace("grpc+tls", "grpc+tcp")
        with fl.FlightClient(plain) as client, pytest.raises((fl.FlightError, OSError)):
            list(client.list_flights(options=fl.FlightCallOptions(timeout=2)))
        assert (shelf.num_reads, shelf.begun) == (0, [])
        exchange(server, shelf, tls)
    finally:
        server.close()


def test_an_impostor_without_a_certificate_of_the_authority_is_not_talked_to(files: Files) -> None:
    tls = load_tls(files(mutual=False), HOST)
    other = trustme.CA()
    shelf = Shelf()
    server = FlightServer(SECRET, shelf, HOST, load_tls(files(ca=other, signed_by=other, mutual=False), HOST))
    try:
        with pytest.raises(StoreError, match=re.escape(server.address)):
            exchange(server, shelf, tls)
        assert (shelf.num_reads, shelf.begun) == (0, [])
    finally:
        server.close()
    plain = FlightServer(SECRET, shelf, HOST)
    try:
        with pytest.raises(StoreError, match=r"SnapshotConfig\.tls must be the same for all"):
            exchange(plain, shelf, tls)
    finally:
        plain.close()


# What is wrong is said before anything is tried.


def test_certificates_that_peers_would_refuse_are_named_with_the_reason(files: Files) -> None:
    other = trustme.CA()
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    wrong = {
        r"10\.0\.0\.9.*IP address mismatch": (files(), "10.0.0.9"),
        "store.example.*Hostname mismatch": (files(server_name="store.example"), HOST),
        "signed by .*ca.pem": (files(signed_by=other), HOST),
        "certificate has expired": (files(not_after=past), HOST),
    }
    for why, (config, host) in wrong.items():
        with pytest.raises(ConfigError, match=why):
            load_tls(config, host)


@pytest.mark.parametrize("name", ["certificate", "private_key", "ca"])
def test_a_file_that_is_missing_or_no_pem_is_named(files: Files, name: str) -> None:
    config = files()
    path = Path(getattr(config, name))
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match=f"{path}.* PEM"):
        load_tls(config, HOST)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}='{path}' cannot be read: No such file"):
        load_tls(config, HOST)


def test_a_key_of_another_certificate_is_named(files: Files) -> None:
    one, other = files(), files()
    with pytest.raises(ConfigError, match="do not go together"):
        load_tls(one.model_copy(update={"private_key": other.private_key}), HOST)


def test_an_encrypted_key_is_refused_without_asking(files: Files, authority: trustme.CA) -> None:
    from cryptography.hazmat.primitives import serialization

    config = files()
    key = serialization.load_pem_private_key(Path(config.private_key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL)
    Path(config.private_key).write_bytes(key.private_bytes(*formats, encryption))
    with pytest.raises(ConfigError, match="encrypted"):
        load_tls(config, HOST)


def test_paths_that_differ_from_process_to_process_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be an absolute path"):
        TlsConfig(certificate="cert.pem", private_key="/key.pem", ca="/ca.pem")


def test_the_private_key_is_not_shown(files: Files) -> None:
    assert "PRIVATE" not in repr(load_tls(files(), HOST))
