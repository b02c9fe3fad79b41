"""A PyTorch module trained by `optimize`: a transformer learns the text of Python's own help.

mpishard run -n 2 examples/train_torch.py         # two ranks; the number of steps may follow
"""

import sys
from pydoc_data import topics

import mpishard as ms
import numpy as np
from torch import nn  # noqa: TID253


class Transformer(nn.Module):  # noqa: D101
    def __init__(self, context=64, width=128):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, 2), nn.Linear(width, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(context)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        return self.head(self.blocks(x, self.mask, is_causal=True)).transpose(1, 2)


def main(backend, steps=200):
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    parts = text[8192:-1], text[8193:], text[:8192], text[1:8193]
    x, y, x_test, y_test = (ms.data.TokenWindows(part, 64, stride=64) for part in parts)
    model = ms.adapters.TorchModel(Transformer(), nn.functional.cross_entropy)
    adam = ms.as_distributed(ms.optimizers.AdamW(1e-3, clip_global_norm=1.0), backend, "fsdp")
    result = adam.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=x,
            y_train=y,
            x_validation=x_test,
            y_validation=y_test,
            batch_size=32,
            max_steps=steps,
            validate_every=steps,
            checkpoint="runs/torch",
        )
    )
    (_, loss), ranks = result.validation_history[-1], backend.world_size
    backend.print(f"{ranks} rank(s), fsdp: validation loss {loss:.3f} nats per byte")


if __name__ == "__main__":
    ms.launch(main, *map(int, sys.argv[1:]))
