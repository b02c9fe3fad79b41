"""A loss written in JAX, sharded: a network learns which of two spirals a point lies on.

python examples/train_jax.py                      # one process
mpishard run -n 2 examples/train_jax.py           # two ranks; the same result
mpishard run -n 2 examples/train_jax.py --strategy ddp
"""

import argparse
import itertools

import mpishard as ms
import jax  # noqa: TID253
import jax.numpy as jnp  # noqa: TID253
import numpy as np


def spirals(samples):
    """Return points on two spirals, and which of them each lies on."""
    place, arm = np.linspace(0.1, 1, samples), np.arange(samples) % 2
    angle = 3 * np.pi * place + np.pi * arm
    points = place[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points.astype(np.float32), arm


def network(parameters, x):
    """Return two logits for each point."""
    for layer in parameters["hidden"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ parameters["head"]["kernel"] + parameters["head"]["bias"]


def loss(parameters, x, arms):
    """Return the mean cross entropy."""
    logs = jax.nn.log_softmax(network(parameters, x))
    return -jnp.mean(jnp.take_along_axis(logs, arms[:, None], axis=1))


def first_values(key, sizes=(2, 128, 128, 2)):
    """Return the first parameters: float32 arrays in dicts."""
    shapes = list(itertools.pairwise(sizes))
    *hidden, head = (
        {"kernel": jax.random.normal(k, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    )
    return {"hidden": hidden, "head": head}


def main(backend, arguments):
    plain = ms.adapters.JaxModel(loss, first_values(jax.random.key(0)), predict=network)
    model = ms.as_distributed(plain, backend, arguments.strategy)
    rule = ms.optimizers.AdamW(5e-3, clip_global_norm=1.0)
    optimizer = ms.as_distributed(rule, backend, arguments.strategy)
    points, arms = spirals(1200)
    optimizer.optimize(
        ms.OptimizationInputData(
            model=model, x_train=points, y_train=arms, batch_size=120, epochs=arguments.epochs
        )
    )
    model.save_model("runs/jax")
    right = (model.predict(points).argmax(axis=1) == arms).mean()
    backend.print(
        f"{backend.world_size} rank(s), {arguments.strategy}: {right:.1%} of the points are right"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["ddp", "zero1", "zero2", "fsdp"], default="fsdp")
    parser.add_argument("--epochs", type=int, default=30)
    ms.launch(main, parser.parse_args())
