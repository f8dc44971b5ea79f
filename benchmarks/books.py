"""What it costs to keep the books of a run with very many checkpoints: the state's size, writing and loading it.

    python benchmarks/books.py --output benchmarks/results/books.json

On a local disk, in one process, with Ray's storage context and no cluster. Each reported checkpoint has a directory of
its own and three metrics.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench.report import describe_machine, show
from ray.train import Checkpoint, CheckpointConfig
from ray.train._internal.session import _TrainingResult
from ray.train.v2._internal.execution.storage import StorageContext

import ray_jax_ckpt as rjc
from ray_jax_ckpt.storage.state import STATE, StateFile

REPEATS = 7


def milliseconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return round(1000 * (time.perf_counter() - start), 3)


def measure(count: int, directory: str) -> dict[str, Any]:
    context = StorageContext(directory, "run")
    files, path = context.storage_filesystem, context.experiment_fs_path
    registry = rjc.Registry(CheckpointConfig(checkpoint_score_attribute="loss"), context)

    def register(number: int) -> float:
        where = Path(path, f"checkpoint_2026-01-01_00-00-00.{number:06d}")
        where.mkdir()
        metrics = {"loss": 1.0 / (number + 1), "step": number, "eval": {"accuracy": number / count}}
        result = _TrainingResult(Checkpoint(str(where), files), metrics)
        return milliseconds(lambda: registry.register_checkpoint(result))

    calls = [register(number) for number in range(count)]
    assert registry.flush() == ""
    file = StateFile(files, path)
    state = file.load().state
    assert len(state.checkpoints) == count
    return {
        "bytes": Path(path, STATE).stat().st_size,
        "register_ms": statistics.median(calls[-REPEATS:]),
        "write_ms": statistics.median(milliseconds(lambda: file.save(state)) for _ in range(REPEATS)),
        "load_ms": statistics.median(milliseconds(file.load) for _ in range(REPEATS)),
    }


def main() -> None:
    """Measures each number of checkpoints and prints, or writes, what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine(), "checkpoints": {}}
    for count in options.checkpoints:
        with tempfile.TemporaryDirectory() as directory:
            results["checkpoints"][str(count)] = measure(count, directory)
    show(results, options.output)


if __name__ == "__main__":
    main()
