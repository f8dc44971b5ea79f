"""What is written is an Orbax checkpoint: real Orbax, both APIs, loads it in a process without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from states import STATES
from written import hold, write

_LOADER = Path(__file__).parent / "load_with_orbax.py"


def load_with_orbax(directories: dict[str, Path], scratch: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(_LOADER), *(f"{name}={path}" for name, path in directories.items())],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=environment,
        cwd=scratch,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == [word for name in directories for word in (name, "ok")]


def test_orbax_loads_what_is_written(tmp_path):
    directories = {name: tmp_path / name for name in STATES}
    for name, path in directories.items():
        write(hold(STATES[name]()), path, custom={"note": "hi"})
    load_with_orbax(directories, tmp_path)
