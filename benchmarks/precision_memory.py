"""Memory of a step of the GPT 8 x 768 on two ranks under FSDP, in one precision.

    mpishard run -n 2 benchmarks/precision_memory.py --precision bfloat16

Activations are the arrays that forward saves for backward. The memory is the largest resident
memory of the ranks in a step, minus that of the same processes before they build the model. By then
a small model has been trained, so that libraries are loaded and loops compiled.
"""

import numpy as np
from harness import measure, options, positive

import mpishard as ms
from mpishard.cli.bench.step import gpt, tokens, training_step
from mpishard.models.programs.program import Batch
from mpishard.observe import memory_while, proportional_memory

HEADS = 8


def saved_bytes(held, seen):
    """Return the bytes of all arrays in nested lists and tuples, each memory once."""
    if isinstance(held, np.ndarray):
        while isinstance(held.base, np.ndarray):
            held = held.base
        is_new = id(held) not in seen
        seen.add(id(held))
        return held.nbytes * is_new
    inner = held if isinstance(held, list | tuple) else ()
    return sum(saved_bytes(each, seen) for each in inner)


def prepare(backend, precision, layers, width, sequences, context):
    """Return the model's engine, a batch and the step."""
    config = ms.ShardingConfiguration(backend, precision=precision)
    x, y = tokens(backend.rank, sequences, context)
    model, step = training_step(config, gpt(width, layers, HEADS, context), "fsdp", x, y)
    return model.engine, (x, y), step


def main(backend, arguments):
    """Measure."""
    precision = None if arguments.precision == "float32" else arguments.precision
    _, _, step = prepare(backend, precision, 1, 64, 1, 16)
    step()
    backend.barrier()
    idle = proportional_memory()
    backend.barrier()
    sizes = (arguments.layers, arguments.width, arguments.batch, arguments.tokens)
    engine, (x, y), step = prepare(backend, precision, *sizes)
    step()
    _, peak = memory_while(step, arguments.steps)
    batch = Batch(x, y, engine.program.default_loss, ms.nn.Context())
    _, _, (saved, *_) = engine.program.forward(engine.parameters, batch)
    activations = saved_bytes(saved, set())
    engine.parameters.abandon()
    totals = backend.all_reduce(np.array([activations, peak - idle]))
    found = {"activations": int(totals[0]), "bytes": int(totals[1])}
    texts = (f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in found.items())
    return found, f"{arguments.precision}, all ranks: {', '.join(texts)}"


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    for name, default in (("layers", 8), ("width", 768), ("batch", 4), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--steps", type=positive, default=2)
    measure(main, parser.parse_args())
