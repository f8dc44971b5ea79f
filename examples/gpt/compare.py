"""Whether two runs of the same training are the same, bit by bit, and a picture of both."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from gpt.faults import Death

FOLDER = "final"


def save_final_state(run_dir: str | Path, rank: int, state: Any) -> str:
    """Writes all shards of `state` on this rank's devices to `<run_dir>/final/rank-<rank>.npz`; returns a digest."""
    import jax

    shards: dict[str, np.ndarray[Any, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for number, shard in enumerate(leaf.addressable_shards):
            shards[f"{jax.tree_util.keystr(path)} {shard.index} #{number}"] = np.asarray(shard.data)
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"rank-{rank}.npz", **shards)  # pyright: ignore[reportArgumentType]
    return digest(shards)


def digest(arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"{name} {array.dtype} {array.shape} ".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What differs between an interrupted run and the uninterrupted one; `identical` if nothing does."""

    num_losses: int
    num_repeated: int
    num_arrays: int
    num_bytes: int
    differences: list[str]

    @property
    def identical(self) -> bool:
        """Whether there was something to compare and all of it was equal."""
        return not self.differences and self.num_losses > 0 and self.num_arrays > 0


def losses_by_step(progress: list[dict[str, Any]], rank: int = 0) -> dict[int, list[str]]:
    """All losses one rank got for each step, in hexadecimal, oldest first: a repeated step has several."""
    losses: dict[int, list[str]] = {}
    for record in progress:
        if record["event"] == "step" and record["rank"] == rank:
            losses.setdefault(record["step"], []).append(record["loss"])
    return losses


def compare(
    interrupted: tuple[Path, list[dict[str, Any]]], reference: tuple[Path, list[dict[str, Any]]], num_steps: int
) -> Comparison:
    """Compares every loss of every rank, repeated steps included, and every byte of the final states.

    Args:
        interrupted: Run directory and progress records of the run with failures.
        reference: The same of the run without.
        num_steps: Both must have done all of these steps.
    """
    differences, num_losses, num_repeated = [], 0, 0
    for rank in sorted({record["rank"] for _, progress in (interrupted, reference) for record in progress}):
        found, expected = losses_by_step(interrupted[1], rank), losses_by_step(reference[1], rank)
        for step in range(1, num_steps + 1):
            values = found.get(step, [])
            num_losses += len(values)
            num_repeated += max(0, len(values) - 1)
            if not values or set(values) != set(expected.get(step, [])):
                differences.append(f"loss of rank {rank}, step {step}: {values} and {expected.get(step, [])}")
    arrays, size, unequal = compare_states(interrupted[0] / FOLDER, reference[0] / FOLDER)
    return Comparison(num_losses, num_repeated, arrays, size, differences + unequal)


def compare_states(folder: Path, reference: Path) -> tuple[int, int, list[str]]:
    """Returns the number of arrays and bytes compared, and what differs, for two folders of `rank-*.npz`."""
    names = sorted({path.name for path in (*folder.glob("rank-*.npz"), *reference.glob("rank-*.npz"))})
    num_arrays, num_bytes, differences = 0, 0, []
    for name in names:
        if not (folder / name).exists() or not (reference / name).exists():
            differences.append(f"{name}: only one run wrote it")
            continue
        with np.load(folder / name) as found, np.load(reference / name) as expected:
            for key in sorted({*found.files, *expected.files}):
                if key not in found.files or key not in expected.files or not _same_bits(found[key], expected[key]):
                    differences.append(f"final state, {name}: {key}")
                else:
                    num_arrays, num_bytes = num_arrays + 1, num_bytes + found[key].nbytes
    return num_arrays, num_bytes, differences


def _same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def draw(path: Path, interrupted: list[dict[str, Any]], reference: list[dict[str, Any]], deaths: list[Death]) -> None:
    """Draws both loss curves into a PNG, with a line where something died and the repeated steps as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.plot(*_curve(losses_by_step(reference)), lw=5, alpha=0.35, label="uninterrupted")
    losses = losses_by_step(interrupted)
    axes.plot(*_curve(losses), label="with failures")
    if repeated := {step: values for step, values in losses.items() if len(values) > 1}:
        axes.plot(*_curve(repeated), "o", ms=4, label="done again")
    for death in deaths:
        axes.axvline(death.step + 0.5, color="tab:red", ls="--", lw=1)
        top = {"xycoords": ("data", "axes fraction"), "va": "top", "color": "tab:red"}
        axes.annotate(f" {death.kind} killed", (death.step + 0.5, 0.97), **top)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training, with and without failures")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(losses: dict[int, list[str]]) -> tuple[list[int], list[float]]:
    steps = sorted(losses)
    return steps, [float.fromhex(losses[step][-1]) for step in steps]
