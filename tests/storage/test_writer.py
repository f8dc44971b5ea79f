"""Writing: in parallel, tried again, bounded; and whatever fails leaves nothing that counts as a checkpoint."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import time

import fsspec
import jax.numpy as jnp
import numpy as np
import pyarrow.fs as pafs
import pytest
from proxy import Proxy, error_response
from servers import make_bucket, s3, s3_server
from sinks import Sink, failing, files_below
from written import hold, write

from ray_jax_ckpt.digest import digest
from ray_jax_ckpt.errors import IntegrityError, PersistError, PersistExistsError
from ray_jax_ckpt.storage import writer
from ray_jax_ckpt.storage.files import TEMPORARY, remove_tree
from ray_jax_ckpt.storage.limiter import Limiter
from ray_jax_ckpt.storage.manifest import BLOCK_BYTES, MANIFEST, parse_manifest
from ray_jax_ckpt.storage.plan import Piece, PlannedFile
from ray_jax_ckpt.storage.writer import Effort, Target, write_files

LOCAL = pafs.LocalFileSystem()
STATE = {"w": jnp.arange(5000, dtype=jnp.float32), "b": {"c": jnp.ones(3)}, "name": "x"}
QUICK = Effort(timeout_s=30)


@pytest.fixture(autouse=True)
def _no_long_delays(monkeypatch):
    monkeypatch.setattr(writer, "_FIRST_DELAY_S", 0.001)


@pytest.fixture(scope="module")
def server():
    with s3_server() as port:
        yield port


@pytest.fixture
def sink():
    return Sink()


def check_whole(files: pafs.FileSystem, path: str) -> None:
    """Everything that the manifest names is there as it says, and nothing else."""
    with files.open_input_stream(f"{path}/{MANIFEST}") as stream:
        manifest = parse_manifest(stream.read(), path)
    there = files.get_file_info(pafs.FileSelector(path, recursive=True))
    assert {info.path.split(f"{path}/", 1)[1] for info in there if info.type == pafs.FileType.File} == {
        *manifest.files,
        MANIFEST,
    }
    for name, record in manifest.files.items():
        with files.open_input_stream(f"{path}/{name}") as stream:
            content = stream.read()
        assert (len(content), digest(content)) == (record.size, record.digest), name


# Filesystems.


def test_on_a_local_disk_the_directory_appears_as_a_whole(tmp_path):
    write(hold(STATE), tmp_path / "run" / "5")
    check_whole(LOCAL, str(tmp_path / "run" / "5"))
    assert os.listdir(tmp_path / "run") == ["5"]


def test_a_store_without_directories_and_renaming_takes_one(sink):
    write(hold(STATE), "bucket/run/5", sink.filesystem())
    check_whole(sink.filesystem(), "bucket/run/5")
    assert sink.opened[-1] == f"bucket/run/5/{MANIFEST}"


def test_a_filesystem_of_fsspec_takes_one(tmp_path):
    files = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("local")))
    write(hold(STATE), tmp_path / "5", files)
    check_whole(LOCAL, str(tmp_path / "5"))


def test_a_part_of_a_filesystem_takes_one(tmp_path):
    write(hold(STATE), "run/5", pafs.SubTreeFileSystem(str(tmp_path), LOCAL))
    check_whole(LOCAL, str(tmp_path / "run" / "5"))


def test_s3_takes_one_in_several_parts_and_without_empty_objects(server):
    big = {"w": jnp.arange(6 << 20, dtype=jnp.float32), "b": jnp.ones(3)}
    make_bucket(server, "parts")
    write(hold(big), "parts/run/5", s3(server))
    check_whole(s3(server), "parts/run/5")
    for info in s3(server).get_file_info(pafs.FileSelector("parts", recursive=True)):
        assert info.type == pafs.FileType.Directory or info.size > 0, info


def test_s3_takes_a_small_file_in_one_request(server):
    make_bucket(server, "small")
    asked = []
    with Proxy(server) as proxy:
        proxy.on_request = lambda piece: (
            asked.append(piece.split(b" HTTP")[0]) if piece[:4] in (b"PUT ", b"POST") else None
        )
        manifest = write(hold(STATE), "small/5", s3(proxy.port))
    assert len(asked) == len(manifest.files) + 1
    check_whole(s3(server), "small/5")


@pytest.mark.parametrize("injected", [Proxy.CUT, error_response(503, "SlowDown"), error_response(500, "InternalError")])
def test_s3_that_cuts_connections_or_throttles_takes_one_in_the_end(server, injected):
    make_bucket(server, "faulty")
    left = [4]

    def answer(piece: bytes) -> bytes | None:
        if b"PUT /faulty" not in piece or left[0] == 0:
            return None
        left[0] -= 1
        return injected

    with Proxy(server) as proxy:
        proxy.on_request = answer
        proxy.latency_s = 0.01
        write(hold(STATE), f"faulty/{left}/5", s3(proxy.port), QUICK)
    assert left == [0]
    check_whole(s3(server), "faulty/[4]/5")
    remove_tree(s3(server), "faulty/[4]")


def test_s3_that_forbids_it_is_named_at_once(server):
    make_bucket(server, "forbidden")
    with Proxy(server) as proxy:
        proxy.on_request = lambda piece: error_response(403, "AccessDenied") if b"PUT /" in piece else None
        with pytest.raises(PersistError, match=r"tried 1 times: .*ACCESS_DENIED"):
            write(hold(STATE), "forbidden/5", s3(proxy.port), QUICK)
    assert not s3(server).get_file_info(pafs.FileSelector("forbidden", recursive=True))


def test_an_s3_server_that_is_gone_is_an_error_and_no_hang():
    with pytest.raises(PersistError, match="5 cannot be written"):
        write(hold(STATE), "bucket/5", s3(1, retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1)), QUICK)


def test_a_bucket_that_is_missing_is_named_at_once(server):
    with pytest.raises(PersistError, match=r"nowhere/run/5.* tried 1 times: .*(NO_SUCH_BUCKET|does not exist)"):
        write(hold(STATE), "nowhere/run/5", s3(server))


# Failures.


def test_a_write_that_fails_now_and_then_is_tried_again(sink):
    sink.on_write = failing(3, lambda: OSError("throttled"))
    write(hold(STATE), "b/5", sink.filesystem(), QUICK)
    check_whole(sink.filesystem(), "b/5")


def test_a_write_that_keeps_failing_says_what_and_leaves_no_checkpoint(sink):
    sink.on_write = failing(10**9, lambda: OSError("throttled"), "w/c/0")
    with pytest.raises(PersistError, match=r"b/5/w/c/0 \(20000 bytes\) .* tried 4 times: throttled") as caught:
        write(hold(STATE), "b/5", sink.filesystem(), QUICK)
    assert f"b/5/{MANIFEST}" not in sink.objects
    assert "b/5/w/c/0" not in sink.objects
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), OSError)


def test_a_full_store_is_not_tried_again(sink):
    sink.quota = 10_000
    with pytest.raises(PersistError, match=r"tried 1 times: .*No space left"):
        write(hold(STATE), "b/5", sink.filesystem(), QUICK)
    assert not any(key.endswith(MANIFEST) for key in sink.objects)


def test_a_manifest_that_cannot_be_written_leaves_no_checkpoint(sink):
    sink.on_write = failing(10**9, lambda: PermissionError(errno.EACCES, "denied"), MANIFEST)
    with pytest.raises(PersistError, match=r"tried 1 times: .*denied"):
        write(hold(STATE), "b/5", sink.filesystem(), QUICK)
    assert f"b/5/{MANIFEST}" not in sink.objects


def test_a_failed_write_is_cleared_away_by_the_next_one_into_its_directory(sink):
    sink.on_write = failing(10**9, lambda: OSError("throttled"), "w/c/0")
    with pytest.raises(PersistError):
        write(hold({**STATE, "extra": jnp.ones(2)}), "b/5", sink.filesystem(), Effort(retries=0))
    assert sink.objects
    sink.on_write = lambda path, size: None
    write(hold(STATE), "b/5", sink.filesystem())
    check_whole(sink.filesystem(), "b/5")


def test_a_failed_write_to_a_disk_is_cleared_away_by_the_next_one(tmp_path):
    (tmp_path / f"5{TEMPORARY}" / "extra").mkdir(parents=True)
    (tmp_path / f"5{TEMPORARY}" / "extra" / "zarr.json").write_text("{}")
    write(hold(STATE), tmp_path / "5")
    check_whole(LOCAL, str(tmp_path / "5"))
    assert os.listdir(tmp_path) == ["5"]


def test_a_checkpoint_that_is_there_is_not_written_over(tmp_path, sink):
    for files, path in ((LOCAL, str(tmp_path / "5")), (sink.filesystem(), "b/5")):
        write(hold(STATE), path, files)
        with pytest.raises(PersistExistsError, match=r"/5 is there already"):
            write(hold(STATE), path, files)
        check_whole(files, path)


def test_a_checkpoint_of_plain_orbax_is_not_taken_for_a_failed_write(sink):
    sink.objects["b/5/_METADATA"] = b"{}"
    with pytest.raises(FileExistsError, match="b/5 is there already"):
        write(hold(STATE), "b/5", sink.filesystem())
    assert sink.objects == {"b/5/_METADATA": b"{}"}


def test_bytes_that_changed_in_memory_are_not_written_as_if_they_had_not(sink):
    held = hold(STATE)
    for part in held.parts.values():
        if part.nbytes > 1000:
            part[500] ^= 1
    with pytest.raises(IntegrityError, match=r"w/c/0: the bytes in memory are not those that were captured"):
        write(held, "b/5", sink.filesystem(), QUICK)
    assert f"b/5/{MANIFEST}" not in sink.objects


def test_a_place_where_nothing_can_be_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PersistError, match=r"file/5 cannot be written: .*Not a directory"):
        write(hold(STATE), tmp_path / "file" / "5")


def test_a_store_that_never_answers_does_not_block_for_ever(sink):
    answer = threading.Event()
    sink.on_open = lambda path: answer.wait(20) and None
    with pytest.raises(PersistError, match=r"took longer than 0.2 s; \d+ files are missing. Raise timeout_s"):
        write(hold(STATE), "b/5", sink.filesystem(), Effort(timeout_s=0.2))
    answer.set()


def test_after_a_failure_no_further_file_is_begun(sink):
    sink.on_write = failing(10**9, lambda: PermissionError("denied"))
    with pytest.raises(PersistError):
        write(hold({f"x{i}": jnp.ones(3) for i in range(50)}), "b/5", sink.filesystem(), Effort(streams=2))
    assert len(sink.opened) < 20


# Streams, digests, bandwidth.


def test_several_files_are_written_at_the_same_time(sink):
    together = threading.Barrier(3, timeout=20)
    waiting = [3]

    def meet(path: str) -> None:
        if path.endswith("zarr.json") and waiting[0] > 0:
            waiting[0] -= 1
            together.wait()

    sink.on_open = meet
    write(hold({f"x{i}": jnp.ones(3) for i in range(8)}), "b/5", sink.filesystem(), Effort(streams=3, timeout_s=30))
    check_whole(sink.filesystem(), "b/5")


def test_of_large_files_only_as_many_as_streams_are_written_at_the_same_time(sink, monkeypatch):
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 1000)
    now, most, lock = [0], [0], threading.Lock()

    def enter(path: str) -> None:
        if "/c/" in path:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.02)  # long enough for others to come, if they could

    def leave(path: str, size: int) -> None:
        if "/c/" in path and size >= 7000:
            with lock:
                now[0] -= 1

    sink.on_open, sink.on_write = enter, leave
    write(hold({f"x{i}": jnp.ones(2000) for i in range(12)}), "b/5", sink.filesystem(), Effort(streams=2, timeout_s=30))
    assert now[0] == 0
    assert most[0] <= 2


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12345])
def test_large_files_have_a_digest_per_block(size, tmp_path):
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    cut = size // 3
    pieces = (Piece("p", 0, cut), Piece("p", cut, size - cut))
    target = Target(LOCAL, str(tmp_path / "c"))
    file = PlannedFile("x", size, digest(content), pieces=pieces)
    record = write_files(target, [file], lambda part, offset, num: content[offset : offset + num])["x"]
    assert (record.size, record.digest) == (size, digest(content))
    blocks = [digest(content[start : start + BLOCK_BYTES]) for start in range(0, size, BLOCK_BYTES)]
    assert list(record.blocks or blocks) == blocks
    assert (record.blocks is None) == (size <= BLOCK_BYTES)
    assert (tmp_path / f"c{TEMPORARY}" / "x").read_bytes() == content.tobytes()


def test_a_limited_writer_waits_for_its_share():
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    limiter = Limiter(100.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(4):
        limiter.take(50)
    assert slept == [0.5, 0.5, 0.5]
    now[0] += 1000
    limiter.take(100)
    limiter.take(100)
    assert slept[3:] == [1.0]
    Limiter(None, sleep=lambda seconds: pytest.fail("waited")).take(10**12)
    with pytest.raises(ValueError, match="writes nothing"):
        Limiter(0)


def test_a_limit_is_shared_by_all_streams(sink):
    taken = []

    class Counting(Limiter):
        def take(self, num_bytes: int) -> None:
            taken.append(num_bytes)

    manifest = write(hold(STATE), "b/5", sink.filesystem(), Effort(limiter=Counting(None)))
    sizes = sum(record.size for record in manifest.files.values())
    assert sum(taken) == sizes + len(sink.objects[f"b/5/{MANIFEST}"])


def test_removing_a_checkpoint_begins_with_its_manifest(sink, tmp_path):
    write(hold(STATE), "b/5", sink.filesystem())
    removed = []
    real = Sink.delete_file
    sink.delete_file = lambda path: (removed.append(path), real(sink, path))[1]
    remove_tree(sink.filesystem(), "b/5", first=MANIFEST)
    assert removed[0] == f"b/5/{MANIFEST}"
    assert not sink.objects
    remove_tree(sink.filesystem(), "b/5", first=MANIFEST)
    write(hold(STATE), tmp_path / "5")
    remove_tree(LOCAL, str(tmp_path / "5"), first=MANIFEST)
    assert files_below(tmp_path) == set()
