"""Time of a training step of a loss in JAX: on ranks, in one process, and over two CPU devices.

    mpishard run -n 2 benchmarks/jax_step.py                    # JaxModel, 64 samples on each rank
    NPROC=1 python benchmarks/jax_step.py --how one             # jit and optax, 64 samples
    python benchmarks/jax_step.py --how devices                 # shard_map, 64 samples on each

All train the same perceptron of 1024 units and 8 layers in float32 with AdamW. The last two donate
their buffers. Needs an environment with JAX, optax and mpishard.
"""

import argparse
from pathlib import Path

import mpishard as ms
from mpishard.base.settings import write
from mpishard.cli.outputs import write_json
from mpishard.observe import time_chain

WIDTH, LAYERS, SAMPLES = 1024, 8, 64
RATE, DECAY = 1e-3, 0.01


def loss(parameters, x, y):
    """Return the mean squared error."""
    import jax.numpy as jnp

    for layer in parameters:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - y) ** 2)


def problem(seed, samples):
    """Return first parameters, inputs and targets, as NumPy arrays."""
    import numpy as np

    generator = np.random.default_rng(seed)

    def normal(*shape):
        return generator.standard_normal(shape, dtype=np.float32)

    x = normal(samples, WIDTH)
    bias = np.zeros(WIDTH, np.float32)
    return [{"kernel": normal(WIDTH, WIDTH) / 32, "bias": bias} for _ in range(LAYERS)], x, x


def on_ranks(backend):
    """Return the step of this rank."""
    parameters, x, y = problem(backend.rank, SAMPLES)
    model = ms.as_distributed(ms.adapters.JaxModel(loss, parameters), backend, "fsdp")
    rule = ms.optimizers.AdamW(RATE, weight_decay=DECAY)
    optimizer = ms.as_distributed(rule, backend, "fsdp")
    return lambda: optimizer.step(model, x, y)


def in_one_process(devices):
    """Return a step of jit and optax, on one device or with the batch over several."""
    import jax
    import optax

    parameters, x, y = problem(0, SAMPLES * devices)
    transformation = optax.adamw(RATE, weight_decay=DECAY)
    differentiate = jax.value_and_grad(loss)
    if devices > 1:
        axis = jax.sharding.PartitionSpec("data")
        mesh = jax.make_mesh((devices,), ("data",))
        whole = jax.sharding.PartitionSpec()

        def averaged(parameters, x, y):
            return jax.lax.pmean(jax.value_and_grad(loss)(parameters, x, y), "data")

        differentiate = jax.shard_map(
            averaged, mesh=mesh, in_specs=(whole, axis, axis), out_specs=whole, check_vma=False
        )
        place, deal = (jax.sharding.NamedSharding(mesh, spec) for spec in (whole, axis))
    else:
        place = deal = None
    x, y = jax.device_put((x, y), deal)

    def update(parameters, state, x, y):
        value, gradients = differentiate(parameters, x, y)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    update = jax.jit(update, donate_argnums=(0, 1))
    held = list(jax.device_put((parameters, transformation.init(parameters)), place))

    def step():
        *held[:], value = update(*held, x, y)
        return float(value)

    return step


def main(backend, arguments):
    """Measure; rank 0 writes."""
    timing = time_chain(on_ranks(backend), arguments.steps, arguments.warmup)
    report(backend.rank, timing, arguments)


def report(rank, timing, arguments):
    """Print the median, and write all times if a file is named."""
    if rank == 0:
        median, best = 1e3 * timing.median, 1e3 * min(timing.seconds)
        print(f"{arguments.how}: median {median:.1f} ms, best {best:.1f} ms")
        if arguments.json is not None:
            write_json(arguments.json, {"seconds": timing.seconds})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=["ranks", "one", "devices"], default="ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.how == "ranks":
        ms.launch(main, arguments)
    else:
        devices = 2 if arguments.how == "devices" else 1
        write("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
        timing = time_chain(in_one_process(devices), arguments.steps, arguments.warmup)
        report(0, timing, arguments)
