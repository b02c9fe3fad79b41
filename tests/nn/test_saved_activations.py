"""What layers say of the memory that they save, beside what their forward pass saves."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn

GPT = nn.GPT(vocabulary_size=11, context_length=7, width=8, heads=2, layers=1, dropout=0.1)
IMAGES = nn.Sequential(
    nn.Conv2D(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(36, 3)
)
ROWS: list[tuple[nn.Layer, tuple[int, ...]]] = [
    (nn.Linear(4, 5), (7, 4)),
    (nn.ReLU(), (7, 4)),
    (nn.Tanh(), (7, 4)),
    (nn.GELU(), (7, 4)),
    (nn.Softmax(), (4,)),
    (nn.SwiGLU(), (7, 4)),
    (nn.LayerNorm(4), (7, 4)),
    (nn.RMSNorm(4), (7, 4)),
    (nn.Dropout(0.5), (7, 4)),
    (nn.Dropout(0.0), (7, 4)),
    (nn.PositionalEmbedding(7, 4), (7, 4)),
    (nn.CausalAttention(2), (7, 24)),
    (nn.Attention(4, kv_heads=2), (7, 32)),
    (nn.MaxPool2D(2), (2, 6, 6)),
    (nn.Flatten(), (2, 6, 6)),
    (nn.Residual(nn.Linear(4, 4), nn.ReLU()), (4,)),
    (nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Dropout(0.0), nn.Linear(5, 3), nn.ReLU()), (4,)),
    (IMAGES, (2, 6, 6)),
    *((layer, (7, 8)) for layer in GPT.layers[2:]),
    (GPT.chain, (7,)),
]


def arrays_in(saved: Any) -> Iterator[np.ndarray]:
    """The arrays that own the memory of what was saved."""
    if isinstance(saved, np.ndarray):
        while isinstance(saved.base, np.ndarray):
            saved = saved.base
        yield saved
    elif isinstance(saved, list | tuple):
        for part in saved:
            yield from arrays_in(part)


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("layer", "shape"), ROWS, ids=lambda value: type(value).__name__)
def test_layers_know_what_they_save(layer: nn.Layer, shape: tuple[int, ...], dtype: Any) -> None:
    parameters: dict[str, Any] = {}
    for name, spec in layer.walk_parameters():
        *path, last = name.split(".")
        inside = parameters
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = np.ones(spec.shape, dtype)
    samples = 3
    x = np.ones((samples, *shape), np.int64 if layer.takes_integers else dtype)
    y, saved = layer.forward(parameters, x, nn.Context())
    (x_memory,), (y_memory,) = arrays_in(x), arrays_in(y)
    kept = {id(array): array for array in arrays_in(saved)}
    own = [a.nbytes for a in kept.values() if a is not x_memory and a is not y_memory]
    said = layer.saved_activations(shape, np.dtype(dtype))
    assert sum(said.arrays) == said.nbytes
    # No array is larger than the largest that is said; a few small ones may be said together.
    assert max(own, default=0) <= samples * max(said.arrays, default=0)
    assert said == nn.SavedActivations(
        sum(own) // samples,
        keeps_input=id(x_memory) in kept,
        keeps_output=y_memory is not x_memory and id(y_memory) in kept,
        is_view=y_memory is x_memory,
    )
