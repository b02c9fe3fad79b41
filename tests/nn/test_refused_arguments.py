"""Layers, losses and models refuse settings of the wrong type, and name the argument."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import nn

SIZES = {"vocabulary_size": 8, "context_length": 4, "width": 4, "heads": 2, "layers": 1}
TWO = np.ones(2)

# fmt: off
REFUSED = [
    *[(f"{name} {flag!r}", TypeError, "bias must be True or False", lambda make=make, flag=flag:
       make(flag))
      for name, make in (("Linear", lambda bias: nn.Linear(4, 2, bias=bias)),
                         ("Conv2D", lambda bias: nn.Conv2D(1, 1, 3, bias=bias)))
      for flag in ("no", None, 1, TWO)],
    *[(f"{name} initializer {value!r}", TypeError, r"function of \(generator, shape\), got",
       lambda make=make, value=value: make(value))
      for name, make in (("Linear", lambda given: nn.Linear(4, 2, initializer=given)),
                         ("Conv2D", lambda given: nn.Conv2D(1, 1, 3, initializer=given)),
                         ("Embedding", lambda given: nn.Embedding(4, 2, given)),
                         ("PositionalEmbedding", lambda given: nn.PositionalEmbedding(4, 2, given)))
      for value in (0, "zeros", TWO)],
    *[(f"tied_to {value!r}", TypeError, "tied_to must be a str, got",
       lambda value=value: nn.Linear(4, 2, tied_to=value)) for value in (5, b"head.weight", TWO)],
    *[(f"shape {shape!r}", error, message, lambda shape=shape: nn.ParameterSpec(shape, np.zeros))
      for shape, error, message in (
          ((1.5,), TypeError, "a size of shape must be an integer, got 1.5"),
          ("ab", TypeError, "a size of shape must be an integer, got 'a'"),
          ((-1,), ValueError, "a size of shape must be 0 or more, got -1"))],
    ("trainable", TypeError, "trainable must be True or False, got 'no'",
     lambda: nn.ParameterSpec((2,), np.zeros, trainable="no")),
    *[(f"causal {flag!r}", TypeError, "causal must be True or False",
       lambda flag=flag: nn.Attention(2, causal=flag)) for flag in ("no", 1, TWO)],
    *[(f"{kind.__name__} {value!r}", error, f"epsilon must be {message}",
       lambda kind=kind, value=value: kind(4, value))
      for kind in (nn.LayerNorm, nn.RMSNorm)
      for error, message, value in (
          (TypeError, "a number", "x"), (TypeError, "a number", None),
          (TypeError, "a number", True), (TypeError, "a number", TWO),
          (ValueError, "above 0 and finite, got inf", float("inf")))],
    *[(f"Dropout {value!r}", TypeError, "rate must be a number", lambda value=value:
       nn.Dropout(value)) for value in ("x", None, False, TWO)],
    *[(f"Huber {value!r}", TypeError, "delta must be a number", lambda value=value:
       nn.Huber(value)) for value in ("x", None, True, TWO)],
    *[(f"CrossEntropy {name} {value!r}", TypeError, f"{name} must be a", lambda name=name,
       value=value: nn.CrossEntropy(**{name: value}))
      for name in ("ignore_index", "label_smoothing", "z_loss") for value in ("x", True, TWO)],
    ("Sequential 5", TypeError, "layer '0' must be a Layer, got int", lambda: nn.Sequential(5)),
    ("Sequential of a class", TypeError, "layer '1' must be a Layer, got the class ReLU",
     lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU)),
    ("Sequential of a list", TypeError, "layer '0' must be a Layer, got list",
     lambda: nn.Sequential([nn.ReLU()])),
    *[(f"Model of a {kind}", TypeError, f"chain must be a Sequential, got {kind}",
       lambda chain=chain: nn.Model(chain, nn.MSE(), input_shape=(4,)))
      for kind, chain in (("Linear", nn.Linear(4, 2)), ("list", [nn.Linear(4, 2)]))],
    ("Model of 4 features", TypeError, "input_shape must be a tuple or list, got int",
     lambda: nn.Model(nn.Sequential(nn.Linear(4, 2)), nn.MSE(), input_shape=4)),
    ("Model with a class as its loss", TypeError, "an ILossFunction, got the class MSE",
     lambda: nn.Model(nn.Sequential(nn.Linear(4, 2)), nn.MSE, input_shape=(4,))),
    ("Sequential of a number", TypeError, "layer 'x' must be a Layer, got int",
     lambda: nn.Sequential({"x": 5})),
    ("Sequential without names", TypeError, "a layer's name must be a str, got int",
     lambda: nn.Sequential({5: nn.ReLU()})),
    *[(f"tied_embeddings {flag!r}", TypeError, "tied_embeddings must be True or False",
       lambda flag=flag: nn.GPT(**SIZES, tied_embeddings=flag)) for flag in ("no", None, TWO)],
    ("GPT dropout None", TypeError, "dropout must be a number, got None",
     lambda: nn.GPT(**SIZES, dropout=None)),
    *[(f"initial_std {value}", ValueError, "initial_std must be above 0 and finite",
       lambda value=value: nn.GPT(**SIZES, initial_std=value))
      for value in (float("nan"), float("inf"))],
    *[(f"generate {name} {value!r}", TypeError, f"{name} must be an integer",
       lambda name=name, value=value: nn.GPT(**SIZES).generate(
           [1], **({"length": 2} | {name: value})))
      for name in ("length", "top_k", "slide") for value in ("x", 1.5, True, TWO)],
    *[(f"generate temperature {value!r}", TypeError, "temperature must be a number",
       lambda value=value: nn.GPT(**SIZES).generate([1], 2, value)) for value in ("x", None, TWO)],
]
# fmt: on


@pytest.mark.parametrize(
    ("error", "message", "call"), [pytest.param(*row, id=name) for name, *row in REFUSED]
)
def test_settings_of_another_type_are_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_numpy_scalars_and_arrays_of_no_dims_are_settings():
    for as_scalar in (np.float32, np.array):
        assert nn.Dropout(as_scalar(0.25)).rate == 0.25
        assert nn.LayerNorm(4, as_scalar(0.25)).epsilon == 0.25
        assert nn.Huber(as_scalar(0.25)).delta == 0.25
        assert nn.CrossEntropy(z_loss=as_scalar(0.25)).z_loss == 0.25
        assert nn.GPT(**SIZES).generate([1], 2, as_scalar(0.5)).shape == (3,)
    for as_flag in (np.bool_, np.array):
        assert nn.Linear(4, 2, bias=as_flag(False)).bias is False
        assert nn.Attention(2, causal=as_flag(True)).causal is True
