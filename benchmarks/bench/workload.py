"""The states that are saved, and a training step of a chosen duration that donates them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

State = dict[str, dict[str, jax.Array]]

GPT2_WIDTH, GPT2_VOCABULARY, GPT2_LENGTH, GPT2_LAYERS = 768, 50304, 1024, 12
GPT2_ADAM_GB = 1.494
MATMUL_SIZE = 512


def gpt2_shapes(gb: float) -> dict[str, tuple[int, ...]]:
    """Parameters of a GPT-2 of 12 layers: 444 leaves with two Adam moments. 1.494 GB is GPT-2 small."""
    width = max(16, round(GPT2_WIDTH * (gb / GPT2_ADAM_GB) ** 0.5 / 16) * 16)
    vocabulary, length = (n * width // GPT2_WIDTH // 16 * 16 for n in (GPT2_VOCABULARY, GPT2_LENGTH))
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocabulary, width), "wpe": (length, width)}
    matrices = {"qkv": (width, 3 * width), "proj": (width, width), "fc": (width, 4 * width), "out": (4 * width, width)}
    for layer in range(GPT2_LAYERS):
        for name, shape in matrices.items():
            shapes |= {f"h{layer:02d}.{name}.w": shape, f"h{layer:02d}.{name}.b": shape[1:]}
        for name in ("ln1.g", "ln1.b", "ln2.g", "ln2.b"):
            shapes[f"h{layer:02d}.{name}"] = (width,)
    return shapes | {"lnf.g": (width,), "lnf.b": (width,)}


def small_shapes(num_leaves: int) -> dict[str, tuple[int, ...]]:
    """Many vectors of 1 KiB."""
    return {f"l{i:05d}": (256,) for i in range(num_leaves)}


def square_shapes(num_leaves: int) -> dict[str, tuple[int, ...]]:
    """Matrices of 4 MiB."""
    return {f"m{i}": (1024, 1024) for i in range(num_leaves)}


SHAPES: dict[str, Callable[[float], dict[str, tuple[int, ...]]]] = {
    "W1": gpt2_shapes,
    "W2": lambda _: small_shapes(5000),
    "W3": lambda _: square_shapes(16),
}


def make_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """One axis over all devices of all processes, or over those given."""
    chosen = jax.devices() if devices is None else devices
    # The first axis is for Orbax's Snapshotter, which counts replicas along it.
    shape = (1, len(chosen))
    return jax.make_mesh(shape, ("replica", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=chosen)


def make_state(mesh: Mesh, shapes: dict[str, tuple[int, ...]], trees: str) -> State:
    """A tree of float32 for every letter of `trees`; matrices are sharded over all devices, vectors replicated."""

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("fsdp", None) if len(shape) == 2 else PartitionSpec())

    def fill() -> dict[str, dict[str, Any]]:
        return {tree: {name: _content(shape) for name, shape in shapes.items()} for tree in trees}

    targets = {tree: {name: sharding(shape) for name, shape in shapes.items()} for tree in trees}
    return jax.block_until_ready(jax.jit(fill, out_shardings=targets)())


def _content(shape: tuple[int, ...]) -> jax.Array:
    """Numbers in [0, 1) without a pattern: what could be compressed would flatter who compresses."""
    bits = jnp.zeros(shape, jnp.uint32)
    for dim, factor in zip(range(len(shape)), (0x9E3779B1, 0x85EBCA6B), strict=False):
        bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim)) * np.uint32(factor)
        bits ^= bits >> 15
    return jax.lax.bitcast_convert_type(bits >> 9 | np.uint32(0x3F800000), jnp.float32) - 1


def local_part(state: State, mesh: Mesh) -> State:
    """This process's shards of a state as arrays of its own devices alone, without a copy."""

    def own(x: jax.Array) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        sharded = x.ndim == 2
        shape = (x.shape[0] * len(shards) // len(x.global_shards), *x.shape[1:]) if sharded else x.shape
        target = NamedSharding(mesh, PartitionSpec("fsdp", None) if sharded else PartitionSpec())
        return jax.make_array_from_single_device_arrays(shape, target, shards)

    return jax.tree.map(own, state)


def abstract(state: State) -> Any:
    """Shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def num_bytes(state: State) -> int:
    """Of all unique shards, on whatever process."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def saved_step(state: State) -> int:
    """The step that every shard of this process carries in its first column.

    Raises:
        ValueError: They do not carry the same one.
    """
    shards = [shard.data for x in jax.tree.leaves(state) for shard in x.addressable_shards]
    marks = {float(value) for shard in shards for value in np.unique(np.asarray(shard)[..., 0])}
    if len(marks) != 1:
        raise ValueError(f"a torn state: its shards are of steps {sorted(marks)[:5]}")
    return int(marks.pop())


class Step:
    """A train step: matrix products on every device, a sum over all of them, and a write to every shard of the state.

    Attributes:
        num_products: Set by `calibrate`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.num_products = 4
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        shape = (mesh.devices.size, MATMUL_SIZE, MATMUL_SIZE)
        block = np.full(shape, 1 / MATMUL_SIZE, np.float32)
        self._matrices = jax.make_array_from_callback(shape, sharding, lambda index: block[index])

    def __call__(self, state: State, number: int) -> State:
        """Donates the state, and returns when the next one is there, marked with `number`."""
        return jax.block_until_ready(_step(state, self._matrices, np.float32(number), np.int32(self.num_products)))

    def calibrate(self, state: State, seconds: float, agree: Callable[[int], int]) -> State:
        """Makes a step take so long. `agree` gives all ranks the number that the first one found."""
        times: dict[int, list[float]] = {4: [], 24: []}
        for self.num_products in (4, 4, 24, 4, 24, 4, 24):
            start = time.perf_counter()
            state = self(state, 0)
            times[self.num_products].append(time.perf_counter() - start)
        short, long = (min(found) for found in times.values())  # the first one compiles, others are disturbed
        each = max((long - short) / 20, 1e-4)
        self.num_products = agree(max(1, round((seconds - short) / each) + 4))
        return state


@partial(jax.jit, donate_argnums=0)
def _step(state: State, matrices: jax.Array, number: jax.Array, num_products: jax.Array) -> State:
    product = jax.lax.fori_loop(0, num_products, lambda _, y: jnp.einsum("bij,bjk->bik", y, matrices), matrices)
    # The sum makes ranks wait for each other, as gradients do, and the write for the products.
    mark = number + jnp.where(jnp.isnan(product.sum()), 1.0, 0.0)
    return jax.tree.map(lambda x: x.at[..., 0].set(mark), state)
