"""A loss written in JAX: a network learns which of two spirals a point lies on.

mpishard run -n 2 examples/train_jax.py           # two ranks; the same result as of one
"""

import mpishard as ms
import jax  # noqa: TID253
import jax.numpy as jnp  # noqa: TID253
import numpy as np


def network(parameters, x):
    hidden = jnp.tanh(x @ parameters["kernel"] + parameters["bias"])
    return hidden @ parameters["head"]


def loss(parameters, x, arms):
    right = jax.nn.one_hot(arms, 2)
    return -jnp.mean(jnp.sum(right * jax.nn.log_softmax(network(parameters, x)), axis=1))


def main(backend):
    place, arms = np.linspace(0.1, 1, 1200), np.arange(1200) % 2
    angle = np.pi * (3 * place + arms)
    points = (place * [np.cos(angle), np.sin(angle)]).T.astype(np.float32)
    kernel = 4 * jax.random.normal(jax.random.key(0), (2, 512))
    first_values = {"kernel": kernel, "bias": jnp.zeros(512), "head": jnp.zeros((512, 2))}
    model = ms.adapters.JaxModel(loss, first_values, predict=network)
    result = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, "fsdp").optimize(
        ms.OptimizationInputData(
            model=model, x_train=points, y_train=arms, batch_size=120, epochs=30
        )
    )
    result.model.save_model("runs/jax")
    right = (result.model.predict(points).argmax(axis=1) == arms).mean()
    backend.print(f"{backend.world_size} rank(s), fsdp: {right:.1%} of the points are right")


if __name__ == "__main__":
    ms.launch(main)
