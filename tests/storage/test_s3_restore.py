"""Restores from a real S3 server, and over a network that fails."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pyarrow.fs as pafs
import pytest
from filesystems import ObjectStore
from orbax_process import state as orbax_state
from proxy import Proxy, error_response
from servers import make_bucket, s3, s3_server
from written import hold, write

from ray_jax_ckpt.errors import NoCheckpointError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.storage import streams
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing.equality import assert_identical

STATE = {"w": jnp.arange(5000, dtype=jnp.float32), "b": {"c": jnp.ones(3)}, "name": "x"}
ONCE = pafs.AwsStandardS3RetryStrategy(max_attempts=1)


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(streams, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def server():
    """With a checkpoint of this package at runs/run/ckpt-5, and one in a database at runs/database."""
    with s3_server() as port:
        make_bucket(port, "runs")
        write(hold(STATE), "runs/run/ckpt-5", s3(port))
        write(hold(STATE, ocdbt=True), "runs/database", s3(port))
        yield port


def test_a_checkpoint_comes_back_by_path_uri_and_the_directory_of_its_steps(server):
    uri = f"s3://key:secret@runs/run/ckpt-5?endpoint_override=http://127.0.0.1:{server}&region=us-east-1"
    for where, filesystem in [("runs/run/ckpt-5", s3(server)), (uri, None), ("runs/run", s3(server))]:
        found = load(where, STATE, filesystem=filesystem)
        assert_identical(found.state, STATE)
        assert found.step == 7


def test_a_database_comes_back(server):
    assert_identical(load("runs/database", STATE, filesystem=s3(server)).state, STATE)


@pytest.mark.parametrize("form", ["v1", "zarr2"])
def test_plain_orbax_comes_back(server, orbax_root, form):
    pafs.copy_files(str(orbax_root / form), f"runs/orbax/{form}", destination_filesystem=s3(server))
    found = load(f"runs/orbax/{form}", orbax_state(), filesystem=s3(server)).state
    assert_identical(found, orbax_state())


@pytest.mark.parametrize("where", ["runs/run/ckpt-5", "runs/database"])
@pytest.mark.parametrize("injected", [Proxy.CUT, error_response(503, "SlowDown"), error_response(500, "InternalError")])
def test_cut_connections_and_throttling_only_take_longer(server, injected, where):
    left = [streams.ATTEMPTS - 1]

    def answer(piece: bytes) -> bytes | None:
        if not piece.startswith(b"GET /runs") or b"list-type" in piece or left[0] == 0:
            return None
        left[0] -= 1
        return injected

    with Proxy(server) as proxy:
        proxy.on_request, proxy.latency_s = answer, 0.01
        found = load(where, STATE, filesystem=s3(proxy.port, retry_strategy=ONCE), timeout_s=60)
    assert_identical(found.state, STATE)
    assert left == [0]


def test_who_may_not_read_is_told_so(server):
    with Proxy(server) as proxy:
        proxy.on_request = lambda piece: error_response(403, "AccessDenied") if piece.startswith(b"GET") else None
        with pytest.raises(StorageError, match="credentials do not allow it"):
            load("runs/run/ckpt-5", STATE, filesystem=s3(proxy.port))


def test_a_bucket_that_is_not_there_is_named(server):
    with pytest.raises(NoCheckpointError, match=r"no checkpoint at nowhere/run \(s3 filesystem\)"):
        load("nowhere/run", STATE, filesystem=s3(server))


def test_a_store_that_does_not_answer_ends_in_time():
    go_on = threading.Event()

    class Silent(ObjectStore):
        def get_file_info(self, paths):
            go_on.wait(30)
            return super().get_file_info(paths)

    try:
        with pytest.raises(RestoreTimeoutError, match=r"Looking at bucket .*0\.3 s.*timeout_s"):
            load("bucket", STATE, filesystem=Silent().filesystem(), timeout_s=0.3)
    finally:
        go_on.set()
