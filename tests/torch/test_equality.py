"""A PyTorch loop with two more lines: float64 parameters are those of one process to 1e-12."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import mpishard.torch as mst  # noqa: E402

nn = torch.nn
STEPS = 20
SAMPLES = 12  # which 1, 2, 3 and 4 ranks share evenly

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])

_making = threading.RLock()  # thread-ranks share PyTorch's generator


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


def perceptron() -> Any:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


def convolutions() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2),
    )  # fmt: skip


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
    with _making:
        torch.manual_seed(0)
        return factory().double()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}


def train(model: Any, optimizer: Any, loss_of: Any, data: Any, clip: Any, steps: int) -> Any:
    """The loop, as it was in one process."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for _ in range(steps):
        loss = loss_of(model, *data)
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()
        scheduler.step()
    return model


@functools.cache
def reference(name: str, rule: str, steps: int = STEPS) -> dict[str, Any]:
    """One process, on all samples."""
    factory, loss_of = MODELS[name]
    kind, options = OPTIMIZERS[rule]
    model = make(factory)

    def clip(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    train(model, kind(model.parameters(), **options), loss_of, batch(name), clip, steps)
    return model.state_dict()


def mine(backend: Any, data: Any) -> Any:
    return tuple(values[backend.rank :: backend.world_size] for values in data)


def difference(model: Any, expected: Any) -> float:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    return max(float((state[name] - expected[name]).abs().max()) for name in expected)


def trained(backend: Any, name: str, rule: str, strategy: str, steps: int = STEPS) -> Any:
    mst.init()
    factory, loss_of = MODELS[name]
    kind, options = OPTIMIZERS[rule]
    model = mst.shard(mst.convert_sync_batchnorm(make(factory)), strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(kind, model, **options)
    clip = functools.partial(mst.clip_grad_norm_, max_norm=0.3)
    return train(model, optimizer, loss_of, mine(backend, batch(name)), clip, steps)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@by_strategy
@in_worlds(1, 2, 3, 4)
def test_parameters_are_those_of_one_process(backend, name, rule, strategy):
    with _making:
        expected = reference(name, rule)
    assert difference(trained(backend, name, rule, strategy), expected) < 1e-12


@by_path
@by_strategy
@in_worlds(3)
def test_ranks_that_share_no_memory_or_are_on_two_nodes(backend, path, strategy):
    with _making:
        expected = reference("gpt", "adamw", 3)
    assert difference(trained(backend, "gpt", "adamw", strategy, 3), expected) < 1e-12


@by_strategy
@in_worlds(2, 3)
def test_plain_batch_norm_has_rank_zeros_buffers_everywhere(backend, strategy):
    """As with PyTorch's DDP: every rank normalises with its own samples."""
    mst.init()
    model = mst.shard(make(convolutions), strategy)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=1e-2)
    alone = make(convolutions)
    x, y = batch("conv")
    for _ in range(3):
        alone.load_state_dict({**model.state_dict(), **dict(alone.named_buffers())})
        alone(x[:: backend.world_size])  # what rank 0 sees
        squared(model, *mine(backend, (x, y))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name])


@by_strategy
@in_worlds(1, 3)
def test_gradients_are_this_ranks_part(backend, strategy):
    mst.init()
    model = mst.shard(make(perceptron), strategy, minimum_unit_size=1)
    squared(model, *mine(backend, batch("mlp"))).backward()
    alone = make(perceptron)
    squared(alone, *batch("mlp")).backward()
    total = 0
    for p, whole in zip(model.parameters(), alone.parameters(), strict=True):
        total += p.grad.numel()
        if strategy == "ddp":
            assert torch.allclose(p.grad, whole.grad, rtol=0, atol=1e-14)
            continue
        place = p._part.in_parameter
        assert torch.allclose(p.grad, whole.grad.view(-1)[place], rtol=0, atol=1e-14)
    shared = strategy == "ddp" or backend.world_size == 1
    elements = sum(p.numel() for p in alone.parameters())
    assert (total == elements) == shared
    assert abs(float(mst.clip_grad_norm_(model, float("inf"))) - float(
        nn.utils.clip_grad_norm_(alone.parameters(), float("inf"))
    )) < 1e-14  # fmt: skip
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
