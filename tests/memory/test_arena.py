from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jax_ckpt.errors import MemoryLimitError, StoreError
from ray_jax_ckpt.memory import arena as arena_
from ray_jax_ckpt.memory.arena import (
    Arena,
    Segment,
    SegmentHandle,
    open_segment,
)
from ray_jax_ckpt.system import available_bytes, process_alive, process_start_time

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096
OWNER = """
import json, signal, sys
from dataclasses import asdict
from ray_jax_ckpt.memory.arena import Arena
arena = Arena()
segment = arena.allocate(int(sys.argv[1]))
segment.view()[:] = 7
print(json.dumps(asdict(segment.handle())), flush=True)
signal.pause()
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


@contextlib.contextmanager
def owner(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], SegmentHandle]]:
    """Another process with one segment full of sevens."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OWNER, str(nbytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, SegmentHandle(**json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


# Segments.


@pytest.mark.parametrize(("asked", "given"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_capacity_is_whole_pages(arena: Arena, asked: int, given: int) -> None:
    segment = arena.allocate(asked)
    assert segment.nbytes == segment.view().nbytes == segment.handle().nbytes == given
    segment.view()[:] = 3


def test_negative_size(arena: Arena) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.allocate(-1)


def test_pages_are_present_before_use(arena: Arena) -> None:
    nbytes = 32 << 20
    before = _resident_bytes()
    segment = arena.allocate(nbytes)
    assert _resident_bytes() - before > 0.9 * nbytes
    segment.view()[0] = 1


def test_older_kernels_are_touched(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_, "_MADV_POPULATE_WRITE", 12345)
    monkeypatch.setattr(arena_, "_MADV_POPULATE_READ", 12345)
    before = _resident_bytes()
    segment = arena.allocate(16 << 20)
    assert _resident_bytes() - before > 14 << 20
    segment.view()[:] = 9
    with open_segment(segment.handle(), writable=True) as mapping:
        assert (mapping.view() == 9).all()
    with open_segment(segment.handle()) as mapping:
        assert (mapping.view() == 9).all()


def test_nothing_has_a_name(arena: Arena) -> None:
    before = set(os.listdir("/dev/shm"))
    segment = arena.allocate(1 << 20)
    assert set(os.listdir("/dev/shm")) <= before
    assert "memfd:ray_jax_ckpt (deleted)" in os.readlink(f"/proc/self/fd/{segment.handle().fd}")


def test_a_neighbour_cannot_shrink_it(arena: Arena) -> None:
    """It would kill everyone who maps it, with SIGBUS."""
    handle = arena.allocate(PAGE).handle()
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


# Reuse and limits.


def test_reuses_what_fits_within_a_quarter(arena: Arena) -> None:
    segment = arena.allocate(100 * PAGE)
    arena.free(segment)
    assert arena.allocate(79 * PAGE) is not segment
    assert arena.allocate(101 * PAGE) is not segment
    assert arena.allocate(80 * PAGE) is segment


def test_reuses_the_tightest(arena: Arena) -> None:
    segments = [arena.allocate(n * PAGE) for n in (110, 101, 105)]
    for segment in segments:
        arena.free(segment)
    assert arena.allocate(100 * PAGE) is segments[1]


def test_books() -> None:
    arena = Arena(100 * PAGE)
    a, b = arena.allocate(40 * PAGE), arena.allocate(20 * PAGE)
    assert (arena.nbytes_used, arena.nbytes_held) == (60 * PAGE, 60 * PAGE)
    arena.free(a)
    assert (arena.nbytes_used, arena.nbytes_held) == (20 * PAGE, 60 * PAGE)
    assert arena.trim() == 40 * PAGE
    assert (arena.nbytes_used, arena.nbytes_held) == (20 * PAGE, 20 * PAGE)
    b.view()[:] = 1
    arena.close()
    assert (arena.nbytes_used, arena.nbytes_held) == (0, 0)


def test_makes_room_by_dropping_free_segments_of_other_sizes() -> None:
    arena = Arena(100 * PAGE)
    small, large = arena.allocate(20 * PAGE), arena.allocate(50 * PAGE)
    arena.free(small)
    arena.free(large)
    arena.allocate(70 * PAGE)
    assert arena.nbytes_held == 90 * PAGE
    with pytest.raises(StoreError, match="dropped"):
        large.view()
    assert small.view().nbytes == 20 * PAGE
    arena.close()


def test_limit_says_its_numbers() -> None:
    arena = Arena(10 * PAGE)
    arena.allocate(8 * PAGE)
    message = f"needs {3 * PAGE} bytes .*, but {8 * PAGE} of the limit of {10 * PAGE} bytes are in use.*max_bytes"
    with pytest.raises(MemoryLimitError, match=message):
        arena.allocate(3 * PAGE)
    arena.allocate(2 * PAGE)
    arena.close()


def test_more_than_the_node_has() -> None:
    arena = Arena()
    with pytest.raises(MemoryLimitError, match="but the node has"):
        arena.allocate(1 << 50)
    assert arena.nbytes_held == 0
    assert 0 < (available_bytes() or 0) < 1 << 50


def test_failure_of_the_system_leaves_the_books_right(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(arena_, "_sealed_memfd", fail)
    with pytest.raises(MemoryLimitError, match="Too many open files"):
        arena.allocate(PAGE)
    assert arena.nbytes_held == 0


def test_freeing_what_is_not_allocated(arena: Arena) -> None:
    segment = arena.allocate(PAGE)
    arena.free(segment)
    with pytest.raises(ValueError, match="not allocated from this arena"):
        arena.free(segment)
    with pytest.raises(ValueError, match="not allocated from this arena"):
        Arena().free(arena.allocate(PAGE))


def test_closed_arena(arena: Arena) -> None:
    segment = arena.allocate(PAGE)
    held = segment.view()
    arena.close()
    arena.close()
    with pytest.raises(StoreError, match="closed"):
        arena.allocate(PAGE)
    with pytest.raises(StoreError, match="dropped"):
        segment.view()
    held[:] = 1  # an array that is still in use keeps its memory: no segmentation fault


def test_dropping_gives_memory_and_descriptors_back(arena: Arena) -> None:
    num_fds, before = len(os.listdir("/proc/self/fd")), _resident_bytes()
    for _ in range(5):
        arena.free(arena.allocate(16 << 20))
        arena.trim()
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert _resident_bytes() - before < 8 << 20


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=20))
def test_never_beyond_the_limit_and_never_one_segment_twice(steps: list[tuple[int, bool]]) -> None:
    arena, used = Arena(60 * PAGE), []
    for pages, release in steps:
        if release and used:
            arena.free(used.pop(pages % len(used)))
        with contextlib.suppress(MemoryLimitError):
            used.append(arena.allocate(pages * PAGE))
            assert used[-1].nbytes >= pages * PAGE
        assert arena.nbytes_used == sum(s.nbytes for s in used) <= arena.nbytes_held <= 60 * PAGE
        assert len({s.id for s in used}) == len(used)
    arena.close()


def test_many_threads() -> None:
    arena, errors = Arena(64 * PAGE), []

    def work(number: int) -> None:
        for _ in range(30):
            try:
                segment = arena.allocate((1 + number) * PAGE)
            except MemoryLimitError as error:  # pragma: no cover
                errors.append(error)
                return
            segment.view()[:] = number
            if not (segment.view() == number).all():
                errors.append(AssertionError("two threads have one segment"))
            arena.free(segment)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert arena.nbytes_used == 0
    arena.close()


# Other processes.


def test_neighbours_share_memory() -> None:
    with owner(PAGE) as (_, handle), open_segment(handle, writable=True) as mine, open_segment(handle) as other:
        assert (mine.view() == 7).all()
        mine.view()[5] = 1
        assert other.view()[5] == 1
        assert not other.view().flags.writeable


def test_mapping_outlives_its_owner_and_memory_goes_with_the_last_user() -> None:
    with owner(1 << 20) as (process, handle):
        mapping = open_segment(handle)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (mapping.view() == 7).all()
        with pytest.raises(StoreError, match=f"process {handle.pid}: its owner is gone"):
            open_segment(handle)
        assert not process_alive(handle.pid, handle.start_time)
        assert _is_mapped(handle.inode)
        mapping.close()
        assert not _is_mapped(handle.inode)


def test_dropped_and_reused_descriptor(arena: Arena) -> None:
    handle = arena.allocate(PAGE).handle()
    arena.close()
    with pytest.raises(StoreError, match="has dropped it"):
        open_segment(handle)
    other = Segment(PAGE)
    assert other.handle().fd == handle.fd
    with pytest.raises(StoreError, match="is another file"):
        open_segment(handle)


def test_reused_pid(arena: Arena) -> None:
    handle = arena.allocate(PAGE).handle()
    with pytest.raises(StoreError, match="another process has its PID"):
        open_segment(replace(handle, start_time=handle.start_time + 1))


def test_closed_mapping(arena: Arena) -> None:
    mapping = open_segment(arena.allocate(PAGE).handle())
    held = mapping.view()
    mapping.close()
    mapping.close()
    assert mapping.closed
    with pytest.raises(StoreError, match="closed"):
        mapping.view()
    assert held.sum() >= 0  # no segmentation fault


# Processes.


def test_a_process_is_alive_until_it_is_gone() -> None:
    process = subprocess.Popen(["sleep", "100"])
    start_time = process_start_time(process.pid)
    assert start_time is not None
    assert process_alive(process.pid, start_time)
    assert not process_alive(process.pid, start_time + 1)
    process.send_signal(signal.SIGSTOP)
    assert process_alive(process.pid, start_time)  # it can go on writing at any time
    process.send_signal(signal.SIGKILL)
    assert _until(lambda: not process_alive(process.pid, start_time))
    assert process_start_time(process.pid) == start_time  # a zombie, until its parent asks
    process.wait()
    assert not process_alive(process.pid, start_time)
    assert process_start_time(process.pid) is None


def test_a_zombie_with_a_living_thread_is_alive() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "print('on', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        start_time = process_start_time(process.pid)
        assert start_time is not None
        assert _until(lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text())
        assert process_alive(process.pid, start_time)
    finally:
        process.kill()
        process.communicate()
    assert not process_alive(process.pid, start_time)


def test_names_with_parentheses(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "100"])
    assert _until(lambda: "Z (b" in Path(f"/proc/{process.pid}/stat").read_text())
    assert process_alive(process.pid, process_start_time(process.pid) or 0)
    process.kill()
    process.wait()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _is_mapped(inode: int) -> bool:
    """Whether any process maps this memfd. Other tests' memory would disturb a look at the node's total."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f" {inode} " in "".join(line for line in maps.read_text().splitlines(True) if "memfd:ray_jax" in line):
                return True
    return False


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_segment_goes_back_to_the_user_that_had_it():
    arena = Arena()
    one, other = arena.allocate(10_000, tag="one"), arena.allocate(10_000, tag="other")
    arena.free(one)
    arena.free(other)
    assert arena.allocate(10_000, tag="other") is other
    assert arena.allocate(10_000, tag="other") is one
    arena.close()


def test_trimming_keeps_what_an_allocation_of_a_useful_size_would_take():
    arena = Arena()
    small, large = arena.allocate(4096), arena.allocate(1 << 20)
    arena.free(small)
    arena.free(large)
    assert arena.trim(useful=[1 << 20]) == small.nbytes
    assert arena.allocate(1 << 20) is large
    arena.close()
