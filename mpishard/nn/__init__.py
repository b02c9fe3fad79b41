"""Layers, losses, and the models built of them."""

from __future__ import annotations

from mpishard.nn.activations import GELU, ReLU, Tanh
from mpishard.nn.attention import CausalAttention
from mpishard.nn.composites import Residual, Sequential
from mpishard.nn.embedding import Embedding, PositionalEmbedding
from mpishard.nn.gpt import GPT
from mpishard.nn.graph import ComputationNode
from mpishard.nn.layer import Context, Layer, ParameterSpec
from mpishard.nn.linear import Linear
from mpishard.nn.losses import MSE, CrossEntropy, Loss
from mpishard.nn.mlp import MLP
from mpishard.nn.model import Model
from mpishard.nn.normalization import LayerNorm
from mpishard.nn.sub_model import SubModel
from mpishard.nn.targets import GradientTargets

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "MSE",
    "CausalAttention",
    "ComputationNode",
    "Context",
    "CrossEntropy",
    "Embedding",
    "GradientTargets",
    "Layer",
    "LayerNorm",
    "Linear",
    "Loss",
    "Model",
    "ParameterSpec",
    "PositionalEmbedding",
    "ReLU",
    "Residual",
    "Sequential",
    "SubModel",
    "Tanh",
]
