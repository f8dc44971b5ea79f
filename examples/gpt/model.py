"""A small decoder-only transformer and its sharded, donated train step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

AXIS = "fsdp"


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the transformer and its training. `batch_size` is the global one, over all ranks."""

    vocabulary: int = 256
    length: int = 128
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    dropout: float = 0.1
    batch_size: int = 16
    learning_rate: float = 3e-3
    num_warmup_steps: int = 20
    num_steps: int = 100
    seed: int = 0


class Block(nnx.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm, with dropout on what they add."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        width = config.width
        self.num_heads = config.num_heads
        self.norm_attention = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.project = nnx.Linear(width, width, rngs=rngs)
        self.norm_feed = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self._attend(self.norm_attention(x)))
        return x + self.dropout(self.narrow(nnx.gelu(self.widen(self.norm_feed(x)))))

    def _attend(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        out = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        return self.project(out.reshape(batch, length, width))


class GPT(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocabulary]`."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_optimizer(config: GPTConfig) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine decay, gradients clipped."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.num_warmup_steps, max(config.num_steps, config.num_warmup_steps + 1)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    """Mean cross entropy of each next byte, in nats."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def make_mesh() -> Mesh:
    """One axis over all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def shard(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """FSDP: a matrix is split along its longest dimension that divides evenly, everything else is on every device."""
    spec: list[str | None] = [None] * len(leaf.shape)
    dividing = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if len(leaf.shape) >= 2 and dividing:
        spec[max(dividing, key=lambda i: leaf.shape[i])] = AXIS
    return NamedSharding(mesh, P(*spec))


class Training:
    """The pure functions of one training on one mesh: `init_state`, `abstract_state`, `step`.

    The state is one pytree: parameters, AdamW's moments and counts, and the random keys that dropout draws from.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._graphdef, shapes = nnx.split(nnx.eval_shape(self._create))
        self._abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard(leaf, mesh)), shapes
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        self._init = jax.jit(lambda: nnx.state(self._create()), out_shardings=shardings)
        self._step = jax.jit(
            functools.partial(_train_step, self._graphdef),
            donate_argnums=0,
            in_shardings=(shardings, NamedSharding(mesh, P(AXIS))),
            out_shardings=(shardings, NamedSharding(mesh, P())),
        )

    def init_state(self) -> Any:
        """A fresh state, made where it belongs: no device or process ever holds all of it."""
        return self._init()

    def abstract_state(self) -> Any:
        """The same tree with `jax.ShapeDtypeStruct` leaves that carry the shardings; costs no memory."""
        return self._abstract

    def step(self, state: Any, batch: NDArray[np.int32]) -> tuple[Any, jax.Array]:
        """One train step on this rank's part of the global batch. `state` is donated: use the returned one."""
        return self._step(state, jax.make_array_from_process_local_data(NamedSharding(self._mesh, P(AXIS)), batch))

    def _create(self) -> tuple[GPT, nnx.Optimizer[GPT]]:
        model = GPT(self._config, nnx.Rngs(self._config.seed))
        return model, nnx.Optimizer(model, make_optimizer(self._config), wrt=nnx.Param)


def _train_step(graphdef: Any, state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    model, optimizer = nnx.merge(graphdef, state)
    loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss
