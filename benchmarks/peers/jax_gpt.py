"""Time of a training step of the benchmarks' GPT in JAX: one process, one jitted function.

    python benchmarks/peers/jax_gpt.py --batch 16
    python benchmarks/peers/jax_gpt.py --batch 16 --bfloat16

Prints one line of JSON. Needs JAX and optax, and nothing of mpishard.
"""

import argparse
import json
import time
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
HEADS = 8
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01


class Block(NamedTuple):
    """Parameters of one block, in the order of `models.Block`; weights as (outputs, inputs)."""

    norm_weight: Any
    norm_bias: Any
    qkv: Any
    projection: Any
    projection_bias: Any
    network_norm_weight: Any
    network_norm_bias: Any
    rise: Any
    rise_bias: Any
    fall: Any
    fall_bias: Any


class GPT(NamedTuple):
    """Parameters of the model, in the order of `models.GPT`."""

    embedding: Any
    position: Any
    blocks: tuple[Block, ...]
    norm_weight: Any
    norm_bias: Any
    head: Any


def initial(width: int, layers: int, context: int) -> GPT:
    """First parameters, normal with deviation 0.02."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(0.02 * generator.standard_normal(shape, dtype=np.float32))

    ones, zeros = jnp.ones(width), jnp.zeros(width)
    blocks = tuple(
        Block(
            ones,
            zeros,
            normal(3 * width, width),
            normal(width, width),
            zeros,
            ones,
            zeros,
            normal(4 * width, width),
            jnp.zeros(4 * width),
            normal(width, 4 * width),
            zeros,
        )
        for _ in range(layers)
    )
    embeddings = normal(VOCABULARY, width), normal(context, width)
    made = GPT(*embeddings, blocks, ones, zeros, normal(VOCABULARY, width))
    return jax.tree.map(jnp.copy, made)  # a buffer that occurs twice cannot be donated


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """Layer normalisation, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (normal * weight + bias).astype(x.dtype)


def logits(p: GPT, tokens_BT: Any) -> Any:
    """Logits of shape (B, T, vocabulary), computed in the dtype of the parameters."""
    B, T = tokens_BT.shape
    x = p.embedding[tokens_BT] + p.position[:T]
    for b in p.blocks:
        qkv = layer_norm(x, b.norm_weight, b.norm_bias) @ b.qkv.T
        q, k, v = (part.reshape(B, T, HEADS, -1) for part in jnp.split(qkv, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, -1)
        x = x + y @ b.projection.T + b.projection_bias
        h = layer_norm(x, b.network_norm_weight, b.network_norm_bias)
        x = x + jax.nn.gelu(h @ b.rise.T + b.rise_bias) @ b.fall.T + b.fall_bias
    return layer_norm(x, p.norm_weight, p.norm_bias) @ p.head.T


def loss(p: GPT, tokens_BT: Any, targets_BT: Any, dtype: Any = jnp.float32) -> Any:
    """Mean cross-entropy of the float32 parameters, with the model computed in ``dtype``."""
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), p)
    scores = jax.nn.log_softmax(logits(cast, tokens_BT).astype(jnp.float32))
    return -jnp.take_along_axis(scores, targets_BT[..., None], axis=-1).mean()


def main(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    import optax

    p = initial(arguments.width, arguments.layers, arguments.tokens)
    rule = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    shape = arguments.batch, arguments.tokens + 1
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)
    x, y = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
    dtype = jnp.bfloat16 if arguments.bfloat16 else jnp.float32

    def update(p: GPT, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, x, y, dtype)
        changes, state = rule.update(gradients, state, p)
        return optax.apply_updates(p, changes), state, value

    step = jax.jit(update, donate_argnums=(0, 1))
    state = rule.init(p)
    moments = []
    for _ in range(arguments.warmup + arguments.steps + 1):
        moments.append(time.perf_counter())
        p, state, value = step(p, state, x, y)
        float(value)  # waits for the step, like a loop that reports its loss
    seconds = [b - a for a, b in pairwise(moments)][arguments.warmup :]
    print(json.dumps({"library": f"JAX {jax.__version__}", "seconds": seconds}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--bfloat16", action="store_true", help="compute in it, with float32 masters"
    )
    main(parser.parse_args())
