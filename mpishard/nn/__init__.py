"""Layers, losses, and the models built of them.

Begin with ``layers/layer.py``, the interface of a layer, and ``models/model.py``, a chain of
layers with a loss and one flat vector of parameters. The chapters, in the order in which they may
import each other:

* ``device_passes``: kernels of layers and losses for arrays on a GPU.
* ``layers``: descriptions of parameters, forward and backward; no layer holds an array.
* ``losses``: weighted sums, so that averages over ranks and micro-batches are correct.
* ``graph``: a model's computation as nodes that a program can walk.
* ``models``: `Model`, and the models that users name: MLP, GPT, linear models.

``layers/products.py`` has the layers' matrix products, ``passes.py`` their compiled loops, and
``targets.py`` the weights of samples. This room imports arrays, contracts, sharding, data, and the
files of plain models from checkpoint.
"""

from __future__ import annotations

from mpishard.nn.checks import deferred_checks
from mpishard.nn.device_passes import products_in
from mpishard.nn.graph.tracing import ComputationNode, input_of, trace_chain
from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, Softmax, SwiGLU, Tanh
from mpishard.nn.layers.attention import Attention, CausalAttention
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.convolution import Conv2D, Flatten, MaxPool2D
from mpishard.nn.layers.dropout import Dropout, MaskStream
from mpishard.nn.layers.embedding import Embedding, PositionalEmbedding, add_rows
from mpishard.nn.layers.initializers import parameter_generator
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    GradientTargets,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    SavedActivations,
    output_and_saved,
    unwritten,
)
from mpishard.nn.layers.linear import FeatureLinear, Linear
from mpishard.nn.layers.normalization import LayerNorm, RMSNorm
from mpishard.nn.layers.products import add_column_sums, product, products_per_second
from mpishard.nn.losses import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber, Loss
from mpishard.nn.models.gpt import GPT, check_drawing, checked_prompt, draw, generate
from mpishard.nn.models.linear_models import MLP, LinearModel, LinearRegression, LogisticRegression
from mpishard.nn.models.model import Model, SubModel
from mpishard.nn.passes import added
from mpishard.nn.targets import parts_of

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
