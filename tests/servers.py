"""Servers on loopback that tests talk to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyarrow.fs as pafs


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """A real S3 API over HTTP on loopback; yields its port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def s3(port: int, *, key: str = "key", secret: str = "secret", **options: Any) -> pafs.S3FileSystem:
    """A client of `s3_server`."""
    return pafs.S3FileSystem(
        access_key=key,
        secret_key=secret,
        region="us-east-1",
        endpoint_override=f"http://127.0.0.1:{port}",
        connect_timeout=5,
        request_timeout=10,
        **options,
    )


def make_bucket(port: int, name: str) -> None:
    s3(port, allow_bucket_creation=True).create_dir(name)
