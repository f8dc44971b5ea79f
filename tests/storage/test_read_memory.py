"""What a restore from storage takes beyond the state that it makes: measured, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from read_memory_process import BATCH_BYTES, LARGE_BYTES, STREAMS, TOTAL_BYTES

from ray_jax_ckpt.storage.manifest import BLOCK_BYTES
from ray_jax_ckpt.storage.segments import PIECE_BYTES

HERE = Path(__file__).parent
SLACK_BYTES = 16 << 20


def test_a_restore_takes_the_state_a_batch_and_a_little_for_each_stream(tmp_path):
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "read_memory_process.py"), str(tmp_path)]
    # tensorstore's threads take and free whole chunks; glibc keeps several of them for each thread, by chance.
    env = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    chunk = LARGE_BYTES // 4
    state = TOTAL_BYTES + max(BATCH_BYTES, chunk) + SLACK_BYTES
    assert peaks["ours"] <= state
    assert peaks["ours, another mesh"] <= state + STREAMS * PIECE_BYTES
    # Verified blocks are kept for the next of many small reads.
    assert peaks["database"] <= state + 4 * BLOCK_BYTES
    # A chunk is compressed in memory, and then decoded as a whole; that of the bomb claims 0.5 MB and is 400 MB.
    for way in ("orbax", "orbax, another mesh", "bomb"):
        assert peaks[way] <= state + STREAMS * 2 * chunk
