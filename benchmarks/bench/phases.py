"""Where the time of a snapshot and of a restore goes: the package's own steps, timed from outside by wrapping them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

from bench.samples import Samples

# (phase, module, attribute): private names on purpose, as this looks inside. One that is gone is left out.
SNAPSHOT = (
    ("call: flatten", "ray_jax_ckpt.session", "flatten"),
    ("call: plan", "ray_jax_ckpt.arrays.plan", "Planner.plan"),
    ("call: memory check", "ray_jax_ckpt.session", "Session._check_memory"),
    ("call: dispatch copies", "ray_jax_ckpt.session", "capture"),
    ("background: get a buffer", "ray_jax_ckpt.pipeline", "Pipeline._begin"),
    ("background: map it", "ray_jax_ckpt.pipeline", "Pipeline._mapping"),
    ("background: wait for the devices", "ray_jax_ckpt.arrays.plan", "Captured.wait"),
    ("background: copy and digest", "ray_jax_ckpt.arrays.plan", "Captured.write"),
    ("background: encode the index", "ray_jax_ckpt.model.index", "Index.to_bytes"),
    ("background: all", "ray_jax_ckpt.pipeline", "Pipeline._store_job"),
)
RESTORE = (
    ("restore: locate", "ray_jax_ckpt.worker", "_locate"),
    ("restore: decode the indices", "ray_jax_ckpt.model.index", "Index.from_bytes"),
    ("restore: catalog", "ray_jax_ckpt.arrays.assemble", "Assembler.__init__"),
    ("restore: map or fetch bytes", "ray_jax_ckpt.memory.reader", "Reader.fetch"),
    ("restore: to the devices", "ray_jax_ckpt.arrays.assemble", "Assembler._device_leaves"),
    ("restore: unmap", "ray_jax_ckpt.memory.reader", "Reader.__exit__"),
    ("restore: read and assemble", "ray_jax_ckpt.worker", "_read"),
    ("restore: all", "ray_jax_ckpt.worker", "restore"),
)


@contextlib.contextmanager
def timed_phases(samples: Samples, phases: tuple[tuple[str, str, str], ...]) -> Iterator[None]:
    """While the context is open, every call of a phase's function adds its seconds to the samples."""
    undo = []
    for phase, module_name, path in phases:
        owner = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        original = vars(owner).get(name) if owner is not None else None
        if original is None:
            continue
        setattr(owner, name, _wrapped(original, samples, phase))
        undo.append((owner, name, original))
    try:
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


def _wrapped(original: object, samples: Samples, phase: str) -> object:
    function = original.__func__ if isinstance(original, classmethod) else original

    @functools.wraps(function)  # pyright: ignore[reportArgumentType]
    def timed(*args, **kwargs):
        with samples.timed(phase):
            return function(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    return classmethod(timed) if isinstance(original, classmethod) else timed
