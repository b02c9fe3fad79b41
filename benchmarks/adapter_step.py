"""Time of a training step of the peers' PyTorch modules, sharded by mpishard's adapter.

    mpishard run -n 2 benchmarks/adapter_step.py --model gpt --json FILE

Needs an environment with both PyTorch and mpishard.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive

import mpishard as ms
from mpishard.adapters import TorchModel
from mpishard.cli.wording import milliseconds
from mpishard.observe import time_chain

sys.path.append(str(Path(__file__).parent / "peers"))


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, str]:
    """Measure."""
    import models

    generator = np.random.default_rng(backend.rank)
    if arguments.model == "gpt":
        module = models.GPT(256, 8, 4)
        tokens = generator.integers(0, models.VOCABULARY, (8, models.CONTEXT + 1))
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    else:
        module = models.mlp(1024, 8)
        x = y = generator.standard_normal((64, 1024), dtype=np.float32)
    wrapped = TorchModel(module, models.loss_of)
    model = ms.as_distributed(wrapped, backend, "fsdp", precision=arguments.precision)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3, weight_decay=0.01), backend, "fsdp")
    timing = time_chain(lambda: optimizer.step(model, x, y), arguments.steps, arguments.warmup)
    return {"seconds": timing.seconds}, f"{arguments.model}: {milliseconds(timing.median)} a step"


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    parser.add_argument("--precision", choices=["bfloat16"], default=None)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--warmup", type=positive, default=5)
    measure(main, parser.parse_args())
