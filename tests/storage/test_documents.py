"""Code in the documents runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from written import hold_group, write

import ray_jax_ckpt as rjc

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "examples/migrating.md", "ray_jax_ckpt/storage/FORMAT.md"]


def programs(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_program_in_a_document_is_python(name):
    found = programs(name)
    assert found
    for program in found:
        compile(program, name, "exec")


def test_plain_orbax_reads_what_several_workers_wrote_and_this_package_what_a_manager_wrote(tmp_path):
    state = {"w": jnp.arange(8.0), "step": 7, "name": "run-7"}
    write(hold_group([state] * 2), tmp_path / "c")
    before = programs("examples/migrating.md")[0].replace("/tmp/orbax", str(tmp_path / "orbax"))
    before = before.replace("51", "11")
    (recipe,) = [program for program in programs("README.md") if "v1.metadata(path)" in program]
    alone = f"import sys\nsys.modules['ray_jax_ckpt'] = None\npath = {str(tmp_path / 'c')!r}\n"
    wanted = "state['w'].tolist() == [*range(8)] and (state['step'], state['name']) == (7, 'run-7')"
    run(f"{alone}{recipe}\nassert {wanted}, state\nassert len(state['w'].sharding.device_set) == 4\n{before}")
    found = rjc.restore(tmp_path / "orbax", {"w": np.zeros(8, np.float32), "count": np.int32(0)})
    assert (found.step, found.state["count"], found.state["w"].tolist()) == (10, 10, [10.0] * 8)


def run(program: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
