"""The benchmarks' models as a PyTorch user writes them, layer for layer those of `mpishard.nn`."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 128
VOCABULARY = 256


class Attention(nn.Module):
    """Causal attention behind a layer norm, as one residual branch; no bias on queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Add projection(softmax(q k^T / sqrt(K) + mask) v)."""
        B, T, D = x_BTD.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x_BTD)).split(D, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTD + self.projection(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention, then the two-layer network, each a residual branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Both branches, one after the other."""
        x_BTD = self.attention(x_BTD)
        return x_BTD + self.network(x_BTD)


class GPT(nn.Module):
    """Decoder-only transformer; the head is not tied to the embedding."""

    def __init__(self, width: int, heads: int, layers: int, context: int = CONTEXT) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of shape (B, T, vocabulary)."""
        x_BTD = self.embedding(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Encoder(nn.Module):
    """BERT-like classifier: TransformerEncoder over embeddings of 30 522 words."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30522, width)
        self.position = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers
        self.head = nn.Linear(width, 2)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of shape (B, 2)."""
        x_BTD = self.embedding(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD[:, 0])


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, as one residual branch."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The sum of both, and ReLU."""
        return functional.relu(self.branch(x_BCHW) + self.skip(x_BCHW))


class ResNet(nn.Module):
    """Residual blocks of doubled width and halved size on images of 32 x 32 pixels."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [3, *(width << number for number in range(layers))]
        self.blocks = nn.ModuleList(
            ResidualBlock(a, b, 1 if a == 3 else 2) for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits of shape (B, 10)."""
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))


class Flow(nn.Module):
    """Normalising flow of affine couplings, each of which has four small parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        half = width // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(half, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """The latent variables."""
        a, b = x_BD.chunk(2, dim=-1)
        for block in self.blocks:
            scale, shift = block(a).chunk(2, dim=-1)
            a, b = b * torch.exp(torch.tanh(scale)) + shift, a
        return torch.cat([a, b], dim=-1)


def mlp(width: int, layers: int) -> nn.Sequential:
    """``layers`` linear layers of ``width`` x ``width`` with a ReLU between each two."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers - 1)]
    return nn.Sequential(*blocks, nn.Linear(width, width))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts that FSDP2 gathers one at a time."""
    return list(getattr(model, "blocks", model))


def loss_of(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss that the models of `mpishard.nn` have by default."""
    if target.dtype == torch.int64:
        classes = prediction.shape[-1]
        return functional.cross_entropy(prediction.view(-1, classes), target.reshape(-1))
    return functional.mse_loss(prediction, target)
