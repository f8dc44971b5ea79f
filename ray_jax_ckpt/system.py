"""What the system says of processes and of free memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# A PID names another process sooner or later; its start time, in clock ticks since boot, makes it unique.
_START_TIME_FIELD = 21
_STATE_FIELD = 2


def process_start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none. With it a PID is unique for good."""
    fields = _process_stat(pid)
    return None if fields is None else int(fields[_START_TIME_FIELD - _STATE_FIELD])


def process_alive(pid: int, start_time: int) -> bool:
    """Whether this very process can still write memory: it runs, is stopped, or is dying with threads left.

    A zombie without threads counts as gone, since its memory is.
    """
    fields = _process_stat(pid)
    if fields is None or int(fields[_START_TIME_FIELD - _STATE_FIELD]) != start_time:
        return False
    # The first thread of a killed process can be a zombie while another one finishes its copy on another core.
    return fields[0] not in ("Z", "X") or _num_threads(pid) > 1


def available_bytes() -> int | None:
    """Bytes of memory that this process can still take without being killed; None if the system does not say."""
    limits = [_meminfo_available(), _cgroup_available()]
    return min((limit for limit in limits if limit is not None), default=None)


def _process_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on. The command before it may hold blanks and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _meminfo_available() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _cgroup_available() -> int | None:
    """What a container's own limit leaves, with cgroups v2; its file pages can be dropped and count as free."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        own = Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].split("\n", 1)[0]
        root = Path("/sys/fs/cgroup") / own
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    return None
