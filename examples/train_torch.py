"""Train a PyTorch transformer on the English text that ships with CPython.

The module is plain PyTorch. mpishard places its parameters in memory that the ranks of a node
share, and shards gradients and optimizer state:

    python examples/train_torch.py
    python examples/train_torch.py -n 2            # two ranks, as threads
    mpishard run -n 2 examples/train_torch.py      # two ranks, as processes
"""

import argparse
from pathlib import Path
from pydoc_data import topics

import mpishard as ms
import numpy as np
import torch  # noqa: TID253
from torch import nn  # noqa: TID253

CONTEXT = 64


class Transformer(nn.Module):
    """Predict each next byte from the bytes before it."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return self.head(x)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = np.frombuffer(text.encode(), np.uint8)
    held_out, windows = tokens[:8193], ms.data.TokenWindows
    model = ms.as_distributed(ms.adapters.TorchModel(Transformer(), loss), backend, "fsdp")
    optimizer = ms.as_distributed(
        ms.optimizers.AdamW(1e-3, weight_decay=0.01, clip_global_norm=1.0), backend, "fsdp"
    )
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=windows(tokens[8192:-1], CONTEXT),
            y_train=windows(tokens[8193:], CONTEXT),
            x_validation=windows(held_out[:-1], CONTEXT, stride=CONTEXT),
            y_validation=windows(held_out[1:], CONTEXT, stride=CONTEXT),
            batch_size=32,
            max_steps=arguments.steps,
            validate_every=arguments.steps,
            checkpoint=arguments.checkpoint,
            throughput_unit="windows",
        )
    )
    backend.print(
        f"{model.parameter_count:,} parameters on {backend.world_size} rank(s): validation loss "
        f"{result.validation_history[-1][1]:.3f} nats per byte; saved in {arguments.checkpoint}"
    )


def positive(text):
    """Parse an integer >= 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs an integer >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-n", type=positive, default=None, metavar="N", help="number of thread-ranks"
    )
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/torch"))
    arguments = parser.parse_args()
    ms.launch(main, arguments, world_size=arguments.n)
