"""The modules and the batches of the tests of PyTorch loops."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn

SAMPLES = 12  # which 1, 2, 3 and 4 ranks share evenly

making = threading.RLock()
"""Thread-ranks share PyTorch's generator."""


class Encoder(nn.Module):
    """Takes a dict, and returns one with the loss in it, as those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Linear(8, 3)
        self.register_buffer("positions", torch.linspace(-1, 1, 40).view(5, 8))

    def forward(self, tokens: Any, mask: Any, labels: Any = None) -> Any:
        x = self.encoder(self.embedding(tokens) + self.positions, src_key_padding_mask=mask)
        logits = self.pooler(x[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class GPT(nn.Module):
    """One block between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.projection = nn.Linear(8, 8)
        self.network = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        q, k, v = (
            p.unflatten(2, (2, 4)).transpose(1, 2) for p in self.qkv(self.norm(x)).split(8, 2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return self.head(x + self.network(x))


class Branches(nn.Module):
    """Which of two branches a pass uses, its caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)  # registered in another order than used
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Any, left: bool) -> Any:
        return self.last((self.left if left else self.right)(x).tanh())


class Silent(torch.autograd.Function):
    """A product whose second factor gets no gradient, and whose first gets none if it is alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: Any = None) -> Any:
        ctx.save_for_backward(factor)
        return x.clone() if factor is None else x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (factor,) = ctx.saved_tensors
        return (None, None) if factor is None else (gradient * factor, None)


class Scale(nn.Module):
    """A factor of all, which is a parameter without dims, as a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.factor * x


def perceptron() -> Any:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


def convolutions() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 2),
        Scale(),
    )


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, with real parameters of odd sizes, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        weight = torch.randn(width, width, 2, dtype=torch.complex128) / width
        self.weight = nn.Parameter(weight)
        self.shifts = nn.ParameterList([torch.randn((), dtype=torch.complex128) for _ in range(3)])
        self.shifts[2].requires_grad_(False)
        self.register_buffer("phase", torch.full((1,), 0.6 - 0.8j, dtype=torch.complex128))

    def forward(self, x: Any) -> Any:
        modes = torch.fft.rfft(x)
        shift = self.phase * self.shifts[0] + self.shifts[1].abs() * self.shifts[2]
        low = torch.einsum("bik,iok->bok", modes[..., :2], self.weight) * shift
        return torch.fft.irfft(torch.cat([low, 0 * modes[..., 2:]], -1), n=x.shape[-1]) * self.gain


def fourier(inside: int = 5, outside: int = 2) -> Any:
    """Three spectral layers between linear ones; the first and the last share a weight."""
    layers = [Spectral(3) for _ in range(3)]
    layers[2].weight = layers[0].weight
    first, last = nn.Linear(inside, 9), nn.Linear(9, outside)
    return nn.Sequential(
        first, nn.Unflatten(1, (3, 3)), layers[0], nn.Tanh(), *layers[1:], nn.Flatten(), last
    )


def squared(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.mse_loss(model(x), y)


def of_dict(model: Any, tokens: Any, mask: Any, labels: Any) -> Any:
    return model(tokens=tokens, mask=mask, labels=labels)["loss"]


def next_tokens(model: Any, tokens: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


MODELS = {
    "mlp": (perceptron, squared), "conv": (convolutions, squared),
    "encoder": (Encoder, of_dict), "gpt": (GPT, next_tokens),
}  # fmt: skip


@functools.cache
def batch(name: str) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(1)
    normal = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    tokens = torch.randint(11, (SAMPLES, 6), generator=g)
    if name == "mlp":
        return normal(SAMPLES, 5), normal(SAMPLES, 2)
    if name == "conv":
        return 3 + normal(SAMPLES, 2, 6, 6), normal(SAMPLES, 2)
    if name == "gpt":
        return tokens[:, :-1], tokens[:, 1:]
    mask = torch.arange(5) >= 3 + torch.arange(SAMPLES)[:, None] % 3
    return tokens[:, 1:], mask, tokens[:, 0] % 3


def make(factory: Any) -> Any:
    with making:
        torch.manual_seed(0)
        return factory().double()


def mine(backend: Any, data: Any) -> Any:
    return tuple(values[backend.rank :: backend.world_size] for values in data)


def difference(model: Any, expected: Any) -> float:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    return max(float((state[name] - expected[name]).abs().max()) for name in expected)
