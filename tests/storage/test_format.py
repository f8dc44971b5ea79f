"""FORMAT.md is enough to write a reader: one that was written from it reads what this package writes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import reader_of_format
from states import STATES
from written import hold, hold_group, write

from ray_jax_ckpt.arrays.tree import plain


def test_the_reader_needs_numpy_and_the_standard_library_only():
    tree = ast.parse(Path(reader_of_format.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("name", ["training", "plain", "named", "unknown", "bare", "nothing"])
def test_it_reads_a_state(tmp_path, name):
    state = STATES[name]()
    write(hold(state), tmp_path / "c")
    compare(reader_of_format.read(tmp_path / "c"), state)


def test_it_reads_what_each_rank_had(tmp_path):
    states = [{"w": np.arange(6), "mine": np.full((2, r + 1), r), "lr": float(r)} for r in range(3)]
    write(hold_group(states), tmp_path / "c")
    for rank, state in enumerate(states):
        compare(reader_of_format.read(tmp_path / "c", rank), state)


def compare(found, state) -> None:
    leaves = jax.tree.leaves(state)
    assert len(found) == len(leaves)
    for (keys, one), leaf in zip(found.items(), leaves, strict=True):
        wanted = np.asarray(plain(leaf)) if isinstance(leaf, jax.Array) else leaf
        assert type(one) is type(wanted), keys
        if isinstance(wanted, np.ndarray | np.generic):
            assert (one.shape, one.dtype, one.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes()), keys
        else:
            assert one == wanted or one != one, keys
