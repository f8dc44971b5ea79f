"""Measures checkpoints on storage beside Orbax's, with the same state in the same process.

    python benchmarks/storage.py                      1.5 GB in 444 leaves, and 10,000 leaves of 16 bytes: ten minutes
    python benchmarks/storage.py --gb 0.1 --repeats 1 --leaves 500

Saving: `OrbaxCheckpointHandler(async_checkpointing=True)`, beside `orbax.checkpoint.v1.save_async`: until the call
returns, until all is there. Loading: `restore`, beside `v1.load`, each of its own checkpoint, into two CPU devices. On
a disk, in a file system in memory, and on a filesystem whose every request takes 50 ms. Memory is that above the
state's, at its peak while a checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

import jax
import jax.numpy as jnp
import psutil
import pyarrow.fs as pafs
from bench.report import describe_machine
from bench.samples import Samples, spread
from bench.workload import abstract, gpt2_shapes, make_mesh, make_state, num_bytes
from orbax.checkpoint import v1

import ray_jax_ckpt as rjc

LATENCY_S = 0.05
TMPFS = Path("/dev/shm")


class Slow(pafs.FileSystemHandler):
    """A folder of a local disk as an object store at a distance: every request takes its time, whatever its size."""

    def __init__(self, folder: Path) -> None:
        self._local = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())

    def get_type_name(self) -> str:
        return "slow"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        time.sleep(LATENCY_S)
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        time.sleep(LATENCY_S)
        return self._local.get_file_info(selector)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        time.sleep(LATENCY_S)
        self._local.create_dir(str(Path(path).parent), recursive=True)
        return self._local.open_output_stream(path)

    def open_input_stream(self, path: str) -> Any:
        time.sleep(LATENCY_S)
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        time.sleep(LATENCY_S)
        return self._local.open_input_file(path)

    def delete_file(self, path: str) -> None:
        time.sleep(LATENCY_S)
        self._local.delete_file(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._local.delete_dir(path)

    def _no(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    open_append_stream = move = copy_file = delete_dir_contents = delete_root_dir_contents = _no


@contextmanager
def peak_memory(found: list[float]) -> Iterator[None]:
    """Adds the growth of this process's memory at its peak, in bytes."""
    process, done = psutil.Process(), threading.Event()
    start = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.01):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        found.append(float(highest - start))


def measure(state: Any, folder: Path, repeats: int, *, slow: bool) -> dict[str, Any]:
    """Saves and loads a state in a folder. The first of each is apart: it compiles, imports and touches memory."""
    samples = Samples()
    template, size = abstract(state), num_bytes(state)
    place = (lambda path: (path.name, pafs.PyFileSystem(Slow(folder)))) if slow else str
    files = 0
    with rjc.OrbaxCheckpointHandler(async_checkpointing=True) as handler:
        for repeat in range(repeats + 1):
            prefix = "" if repeat else "first "
            ours, theirs = folder / f"ours{repeat}", folder / f"orbax{repeat}"
            with peak_memory(samples.series[f"{prefix}ours, memory"]), samples.timed(f"{prefix}ours, saved"):
                with samples.timed(f"{prefix}ours, call"):
                    handler.save(place(ours), state)
                handler.wait_until_finished()
            with samples.timed(f"{prefix}ours, loaded"):
                found = handler.restore(place(ours), state)
            _check(found, state)
            del found
            files = sum(1 for path in ours.rglob("*") if path.is_file())
            if not slow:
                _orbax(state, template, theirs, prefix, samples)
            shutil.rmtree(ours)
    seconds = {name: spread(values) for name, values in samples.series.items() if "memory" not in name}
    memory = {name: spread([value / size for value in v], 2) for name, v in samples.series.items() if "memory" in name}
    return {"bytes": size, "leaves": len(jax.tree.leaves(state)), "files": files, "seconds": seconds, "x state": memory}


def _orbax(state: Any, template: Any, path: Path, prefix: str, samples: Samples) -> None:
    with peak_memory(samples.series[f"{prefix}Orbax, memory"]), samples.timed(f"{prefix}Orbax, saved"):
        with samples.timed(f"{prefix}Orbax, call"):
            response = v1.save_async(path, state)
        response.result()
    with samples.timed(f"{prefix}Orbax, loaded"):
        found = v1.load(path, template)
    _check(found, state)
    shutil.rmtree(path)


def _check(found: Any, state: Any) -> None:
    same = jax.tree.map(lambda a, b: bool((a == b).all()) and a.sharding == b.sharding, found, state)
    if not all(jax.tree.leaves(same)):
        raise ValueError("what was loaded is not what was saved")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.494, help="size of the large state (default: %(default)s)")
    parser.add_argument("--leaves", type=int, default=10_000, help="of the other state (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="beside a first one (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "storage.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the result file."""
    options = parse_arguments(argv)
    mesh = make_mesh()
    large = make_state(mesh, gpt2_shapes(options.gb), "pmv")
    tiny = {"t": {f"leaf{i:05d}": jnp.full(4, i, jnp.float32) for i in range(options.leaves)}}
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tiny = jax.device_put(tiny, everywhere)
    small = make_state(mesh, gpt2_shapes(options.gb / 15), "pmv")
    result: dict[str, Any] = {"machine": describe_machine(), "repeats": options.repeats, "runs": {}}
    runs = {
        "large, disk": (large, None, False),
        "large, memory": (large, TMPFS, False),
        "tiny leaves, disk": (tiny, None, False),
        "a fifteenth of the large one, 50 ms for each request": (small, None, True),
    }
    for name, (state, where, slow) in runs.items():
        with tempfile.TemporaryDirectory(dir=where) as folder:
            result["runs"][name] = measure(state, Path(folder), options.repeats, slow=slow)
        _show(name, result["runs"][name])
    result["load_average_after"] = os.getloadavg()
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _show(name: str, run: dict[str, Any]) -> None:
    print(f"\n{name}: {run['bytes'] / 1e9:.3f} GB, {run['leaves']} leaves, {run['files']} files")
    print("| | median | least | most |\n|---|---|---|---|")
    for what, found in (run["seconds"] | run["x state"]).items():
        unit = "x state" if "memory" in what else "s"
        print(f"| {what}, {unit} | {found['median']:.3g} | {found['min']:.3g} | {found['max']:.3g} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
