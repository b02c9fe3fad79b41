"""Layers, losses, and the models built of them."""

from __future__ import annotations

from mpishard.nn.activations import GELU, ReLU, Sigmoid, SiLU, Tanh
from mpishard.nn.attention import Attention, CausalAttention
from mpishard.nn.cache import KeyValueCache
from mpishard.nn.composites import Residual, Sequential
from mpishard.nn.convolution import Conv2D
from mpishard.nn.cross_entropy import BinaryCrossEntropy, CrossEntropy
from mpishard.nn.dropout import Dropout
from mpishard.nn.embedding import Embedding, PositionalEmbedding
from mpishard.nn.feature_linear import FeatureLinear
from mpishard.nn.flatten import Flatten
from mpishard.nn.gated import SwiGLU
from mpishard.nn.generation import generate
from mpishard.nn.gpt import GPT
from mpishard.nn.graph import ComputationNode
from mpishard.nn.layer import Context, Layer, ParameterSpec
from mpishard.nn.linear import Linear
from mpishard.nn.linear_models import LinearModel, LinearRegression, LogisticRegression
from mpishard.nn.losses import MAE, MSE, Huber, Loss
from mpishard.nn.mlp import MLP
from mpishard.nn.model import Model
from mpishard.nn.normalization import LayerNorm, RMSNorm
from mpishard.nn.pooling import MaxPool2D
from mpishard.nn.softmax import Softmax
from mpishard.nn.sub_model import SubModel
from mpishard.nn.targets import GradientTargets

__all__ = [
    "GELU",
    "GPT",
    "MAE",
    "MLP",
    "MSE",
    "Attention",
    "BinaryCrossEntropy",
    "CausalAttention",
    "ComputationNode",
    "Context",
    "Conv2D",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "FeatureLinear",
    "Flatten",
    "GradientTargets",
    "Huber",
    "KeyValueCache",
    "Layer",
    "LayerNorm",
    "Linear",
    "LinearModel",
    "LinearRegression",
    "LogisticRegression",
    "Loss",
    "MaxPool2D",
    "Model",
    "ParameterSpec",
    "PositionalEmbedding",
    "RMSNorm",
    "ReLU",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SubModel",
    "SwiGLU",
    "Tanh",
    "generate",
]
