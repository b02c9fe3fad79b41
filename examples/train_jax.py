"""A loss written in JAX: a network learns which of two spirals a point lies on.

mpishard run -n 2 examples/train_jax.py           # two ranks; the same result as of one
"""

import mpishard as ms
import jax  # noqa: TID253
import jax.numpy as jnp  # noqa: TID253
import numpy as np


def network(parameters, x):
    *hidden, head = parameters
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ head["kernel"] + head["bias"]


def loss(parameters, x, arms):
    logs = jax.nn.log_softmax(network(parameters, x))
    return -jnp.mean(jnp.take_along_axis(logs, arms[:, None], axis=1))


def layer(key, inputs, outputs):
    kernel = jax.random.normal(key, (inputs, outputs)) / inputs**0.5
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def main(backend):
    place, arms = np.linspace(0.1, 1, 1200), np.arange(1200) % 2
    angle = np.pi * (3 * place + arms)
    points = (place * [np.cos(angle), np.sin(angle)]).T.astype(np.float32)

    keys, sizes = jax.random.split(jax.random.key(0), 3), [(2, 128), (128, 128), (128, 2)]
    first_values = [layer(key, *size) for key, size in zip(keys, sizes, strict=True)]
    plain = ms.adapters.JaxModel(loss, first_values, predict=network)
    model = ms.as_distributed(plain, backend, "fsdp")
    rule = ms.optimizers.AdamW(5e-3, clip_global_norm=1.0)
    ms.as_distributed(rule, backend, "fsdp").optimize(
        ms.OptimizationInputData(
            model=model, x_train=points, y_train=arms, batch_size=120, epochs=30
        )
    )
    model.save_model("runs/jax")
    right = (model.predict(points).argmax(axis=1) == arms).mean()
    backend.print(f"{backend.world_size} rank(s), fsdp: {right:.1%} of the points are right")


if __name__ == "__main__":
    ms.launch(main)
