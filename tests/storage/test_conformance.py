"""What is written is an Orbax checkpoint: real Orbax, both APIs, loads it in a process without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from states import STATES
from written import Held, hold, hold_group, write

_LOADER = Path(__file__).parent / "load_with_orbax.py"


def load_with_orbax(directories: Sequence[tuple[str, Path]], scratch: Path) -> None:
    """Compares (name of a state, directory) pairs in one process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(_LOADER), *(f"{name}={path}" for name, path in directories)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=environment,
        cwd=scratch,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == [word for name, _ in directories for word in (name, "ok")]


def test_orbax_loads_what_is_written(tmp_path):
    directories = [(name, tmp_path / name) for name in STATES]
    for name, path in directories:
        write(hold(STATES[name]()), path, custom={"note": "hi"})
    for ocdbt in (False, True):
        directories.append(("ranks", tmp_path / f"ranks-{ocdbt}"))
        write(several_ranks(ocdbt), directories[-1][1], custom={"note": "hi"})
    load_with_orbax(directories, tmp_path)


def several_ranks(ocdbt: bool) -> Held:
    """Of global arrays each rank has its rows; of what differs Orbax gets rank 0's."""
    state = STATES["ranks"]()
    others = [{**state, "own": np.full(3, rank), "lr": rank / 2} for rank in range(1, 4)]
    return hold_group([state, *others], data=[{"value": rank} for rank in range(4)], ocdbt=ocdbt)


def test_the_comparison_can_fail(tmp_path):
    write(hold(STATES["bare"]()), tmp_path / "flipped", custom={"note": "hi"})
    chunk = tmp_path / "flipped" / "c" / "1"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    with pytest.raises(AssertionError, match="bare: v1 with a template"):
        load_with_orbax([("bare", tmp_path / "flipped")], tmp_path)
