"""Loads checkpoints with plain Orbax, in a process that does not have this package.

Called as `load_with_orbax.py STATE=DIRECTORY ...`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parent))

import orbax.checkpoint as v0
from orbax.checkpoint import v1
from states import STATES, abstract, facts, unknown_to_orbax

# Nothing so far needed this package, and nothing can import it from here on, also where it is installed.
assert "ray_jax_ckpt" not in sys.modules
sys.modules["ray_jax_ckpt"] = None  # pyright: ignore[reportArgumentType]
# Without a template Orbax asks for one in a warning.
warnings.filterwarnings("ignore", "Sharding info not provided")


def main(name: str, path: str) -> None:
    state = unknown_to_orbax() if name == "unknown" else STATES[name]()
    check(f"{name}: v1 with a template", v1.load(path, abstract(state)), state, exact=True)
    check(f"{name}: v1 on another mesh", v1.load(path, abstract(state, 1, 4)), state, exact=True)
    check(f"{name}: v1 on one device", v1.load(path, abstract(state, 1, 1)), state, exact=True)
    check(f"{name}: v1 without a template", v1.load(path), state, exact=False)
    check_v1_metadata(path)
    with v0.StandardCheckpointer() as checkpointer:
        check(f"{name}: v0 without a template", checkpointer.restore(path), state, exact=False)
        if name in ("training", "dtypes", "bare"):
            check(f"{name}: v0 with a template", checkpointer.restore(path, abstract(state)), state, exact=True)
        assert checkpointer.metadata(path).item_metadata is not None
    with v0.PyTreeCheckpointer() as checkpointer:
        check(f"{name}: v0 pytree", checkpointer.restore(path), state, exact=False)


def check_v1_metadata(path: str) -> None:
    found = v1.metadata(path)
    assert found.metadata is not None
    assert found.custom_metadata == {"note": "hi"}
    assert found.init_timestamp_nsecs


def check(what: str, found: Any, wanted: Any, *, exact: bool) -> None:
    one, other = facts(found, exact=exact), facts(wanted, exact=exact)
    assert one == other, f"{what}\nfound  {one}\nwanted {other}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        state_name, _, directory = argument.partition("=")
        main(state_name, directory)
        print(state_name, "ok")
