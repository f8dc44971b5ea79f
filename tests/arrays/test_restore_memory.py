"""What a restore takes beyond the state that it makes: measured, as a ratio to the state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from restore_memory_process import BATCH_BYTES, LARGE_BYTES, TOTAL_BYTES

HERE = Path(__file__).parent
SLACK_BYTES = 8 << 20


def test_a_restore_takes_the_state_and_a_batch_of_what_came_from_other_nodes():
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "restore_memory_process.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    batch = max(BATCH_BYTES, LARGE_BYTES // 4)  # one shard of the largest leaf
    assert peaks["own node"] <= TOTAL_BYTES + SLACK_BYTES
    assert peaks["other node"] <= TOTAL_BYTES + batch + SLACK_BYTES
    # The measurement would show it.
    assert peaks["one batch"] > 1.8 * TOTAL_BYTES
