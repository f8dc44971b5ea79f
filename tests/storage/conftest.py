"""Checkpoints that plain Orbax wrote in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def orbax_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what orbax_process.py writes. Not to be changed."""
    root = tmp_path_factory.mktemp("orbax")
    script = Path(__file__).parent / "orbax_process.py"
    done = subprocess.run([sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return root
