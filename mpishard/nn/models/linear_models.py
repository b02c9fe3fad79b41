"""Linear models and the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    Device,
    Document,
    array_namespace,
    check_sizes,
    is_size,
    to_host,
)
from mpishard.contracts import ModelMetadata
from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, Softmax, Tanh, sigmoid
from mpishard.nn.layers.composites import Sequential
from mpishard.nn.layers.initializers import glorot_uniform, kaiming_uniform
from mpishard.nn.layers.layer import Context, Layer
from mpishard.nn.layers.linear import FeatureLinear, Linear
from mpishard.nn.losses import MSE, BinaryCrossEntropy, CrossEntropy, Loss
from mpishard.nn.models.model import Model

_SPREAD = "feature_spread"


class LinearModel(Model):
    """Base of the linear models: one linear layer and a loss.

    A model has a set of active features and the spread of each feature. Both are saved and loaded
    with the parameters, and a copy of the model has its own. If a file has none, all features are
    active and their spread is 1.

    Parameters
    ----------
    features, outputs : int
        Numbers F of features and O of outputs. Inputs have shape (B, F), predictions (B, O).
    loss : Loss
        Loss that training minimises.
    seed : int
        Seed of the initial coefficients. The initial intercept is 0.
    dtype : str or numpy.dtype
        Dtype of parameters and computation.
    device : str or Device
        Device of parameters and computation: see `Model`.
    feature_names : sequence of str, optional
        F different names. The default is "feature0", "feature1", ...

    Raises
    ------
    ValueError
        If a size is not an integer >= 1, or there are not F different names.
    """

    def __init__(
        self,
        features: int,
        outputs: int,
        loss: Loss,
        *,
        seed: int = 0,
        dtype: Any = "float64",
        device: str | Device = "cpu",
        feature_names: Sequence[str] | None = None,
    ) -> None:
        check_sizes(type(self).__name__, features=features, outputs=outputs)
        if feature_names is None:
            feature_names = [f"feature{i}" for i in range(features)]
        # Names are the keys of the importance, and must differ.
        if len(set(feature_names)) != features or len(feature_names) != features:
            raise ValueError(
                f"feature_names must be {features} different names, got {len(feature_names)}, of "
                f"which {len(set(feature_names))} differ"
            )
        self.feature_names = tuple(feature_names)
        # On the host: it is a statistic of the data, and takes no part in training.
        self._spread = np.ones(features)
        chain = Sequential({"linear": FeatureLinear(features, outputs)})
        super().__init__(
            chain, loss, input_shape=(features,), seed=seed, dtype=dtype, device=device
        )

    @property
    def coefficients(self) -> Array:
        """A copy of the coefficients, shape (O, F)."""
        return self._view("weight").copy()

    @property
    def intercept(self) -> Array:
        """A copy of the intercept, shape (O,): the prediction if all features are 0."""
        return self._view("bias").copy()

    def _view(self, name: str) -> Array:
        view: Array = self.parameter_table.nested_views(self._parameters())["linear"][name]
        return view

    # ----------------------------------------------------------------------------------- features

    def get_active_feature_indices(self) -> list[int]:
        """Return the indices of the active features, ascending; all of them at first."""
        return list(self._features["linear"].active)

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use the features ``indices`` and no others.

        An inactive feature counts as 0 and has no gradient. Its coefficient does not affect
        predictions. It stays the same, except for an optimizer's weight decay and momentum. Under
        sharding, all ranks must pass the same indices.

        Raises
        ------
        ValueError
            If an index is not an integer in [0, F).
        """
        self._features["linear"].active = tuple(indices)

    @property
    def feature_spread(self) -> Array:
        """Standard deviation of each feature over the data, shape (F,), in the features' units.

        `get_feature_importance` multiplies by it. It is 1 until ``model.feature_spread =
        x.std(axis=0)`` sets it, because the model keeps no statistics of its inputs.
        """
        return self._spread.copy()

    @feature_spread.setter
    def feature_spread(self, spread: Array) -> None:
        array_namespace(spread)
        self._spread = self._checked_spread(to_host(spread))

    def _checked_spread(self, spread: Any) -> Array:
        # A copy, because the caller may change the array.
        values = np.array(spread, np.float64)
        if values.shape != self._spread.shape:
            raise ValueError(f"feature_spread needs shape {self._spread.shape}, got {values.shape}")
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"feature_spread must be finite and >= 0, got {values}")
        return values

    def get_feature_importance(self) -> dict[str, float]:
        """Return the change of the prediction for one standard deviation of each feature, by name.

        That is abs(coefficient) * `feature_spread`, averaged over the outputs, in units of the
        prediction. It is 0 for an inactive feature.
        """
        sizes_OF = np.abs(self._effective_coefficients(to_host(self._view("weight"))))
        # An inactive feature keeps its coefficient, which does not count here.
        active_F = np.zeros(len(self.feature_names))
        active_F[self.get_active_feature_indices()] = 1.0
        importance_F = sizes_OF.mean(axis=0, dtype=np.float64) * self._spread * active_F
        return dict(zip(self.feature_names, importance_F.tolist(), strict=True))

    def _effective_coefficients(self, weight_OF: Array) -> Array:
        """Return the part of the coefficients that predictions depend on: by default all."""
        return weight_OF

    def get_model_metadata(self) -> ModelMetadata:
        """Return the metadata, with the features' importance unless a wrapper holds parameters."""
        metadata = super().get_model_metadata()
        # A wrapper holds the coefficients, and gathering them would be collective.
        if self._holder is None:
            metadata.feature_importance = self.get_feature_importance()
        return metadata

    # -------------------------------------------------------------------------------------- files

    def choices(self) -> Document:
        """Return the active features and the spread, each only if it is not the default."""
        choices = super().choices()
        if (self._spread != 1).any():
            choices[_SPREAD] = self._spread.tolist()
        return choices

    def check_choices(self, choices: Mapping[str, object]) -> None:
        super().check_choices(choices)
        self._spread_of(choices)

    def take_choices(self, choices: Mapping[str, object]) -> None:
        super().take_choices(choices)
        self._spread = self._spread_of(choices)

    def _spread_of(self, choices: Mapping[str, object]) -> Array:
        return self._checked_spread(choices.get(_SPREAD, np.ones(len(self.feature_names))))


class LinearRegression(LinearModel):
    """Linear regression y = x W^T + b by least squares.

    Targets have shape (B, O); ``y[:, None]`` makes this shape of a vector. The loss is `MSE`.
    Parameters and errors are those of `LinearModel`; the default is one output.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard.nn import LinearRegression
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> model = LinearRegression(2)
    >>> for _ in range(200):
    ...     _ = model.train(x, x @ np.array([[3.0], [-1.0]]) + 5.0, learning_rate=0.2)
    >>> model.coefficients.round(3).tolist(), model.intercept.round(3).tolist()
    ([[3.0, -1.0]], [5.0])
    """

    def __init__(
        self,
        features: int,
        outputs: int = 1,
        *,
        seed: int = 0,
        dtype: Any = "float64",
        device: str | Device = "cpu",
        feature_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            features,
            outputs,
            MSE(),
            seed=seed,
            dtype=dtype,
            device=device,
            feature_names=feature_names,
        )


class LogisticRegression(LinearModel):
    """Classifier whose logits are linear functions of the features.

    ``predict`` returns logits, as the loss takes them. `predict_classes` and
    `predict_probabilities` convert them.

    Two classes have one logit, that of class 1 (Bishop, "Pattern recognition and machine learning",
    2006, section 4.3.2). Predictions, and targets that are 0 or 1, have shape (B, 1), and the loss
    is `BinaryCrossEntropy`. Three classes or more have one logit each (section 4.3.4). Predictions
    have shape (B, C), targets are integers of shape (B,), and the loss is `CrossEntropy`. Other
    parameters and errors are those of `LinearModel`.

    Parameters
    ----------
    features : int
        Number F of features.
    classes : int
        Number C of classes, at least 2.

    Raises
    ------
    ValueError
        If there are fewer than 2 classes, or as for `LinearModel`.
    """

    def __init__(
        self,
        features: int,
        classes: int = 2,
        *,
        seed: int = 0,
        dtype: Any = "float64",
        device: str | Device = "cpu",
        feature_names: Sequence[str] | None = None,
    ) -> None:
        if not is_size(classes, 2):
            raise ValueError(f"LogisticRegression needs an integer classes >= 2, got {classes!r}")
        self.classes = int(classes)
        # Two classes need one logit: the gradient of a second would be minus that of the first.
        outputs, loss = (1, BinaryCrossEntropy()) if classes == 2 else (classes, CrossEntropy())
        super().__init__(
            features,
            outputs,
            loss,
            seed=seed,
            dtype=dtype,
            device=device,
            feature_names=feature_names,
        )

    def predict_probabilities(self, x: Array) -> Array:
        """Return the probability of each class, shape (B, C), for x of shape (B, F)."""
        return self.probabilities(self.predict(x))

    def predict_classes(self, x: Array) -> Array:
        """Return the likeliest class of each input, integers of shape (B,)."""
        classes: Array = self.probabilities(self.predict(x)).argmax(axis=1)
        return classes

    def probabilities(self, logits: Array) -> Array:
        """Return the probability of each class, shape (B, C), for logits of any ``predict``.

        The logits may be those of a sharded model, too.
        """
        if self.classes > 2:
            return Softmax().forward({}, logits, Context(training=False))[0]
        # 1 - sigmoid(x) would lose the digits of small probabilities.
        return NAMESPACES[type(logits)].concatenate([sigmoid(-logits), sigmoid(logits)], axis=1)

    def _effective_coefficients(self, weight_OF: Array) -> Array:
        """Return the coefficients minus their mean over the classes, which softmax cancels."""
        return weight_OF - weight_OF.mean(axis=0) if self.classes > 2 else weight_OF


_ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    "gelu": GELU,
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "silu": SiLU,
    "tanh": Tanh,
}


class MLP(Model):
    """Multi-layer perceptron: linear layers with activations between them.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the input, of each hidden layer, and of the output. Inputs have shape
        (B, sizes[0]), predictions (B, sizes[-1]).
    activation : {"relu", "gelu", "silu", "sigmoid", "tanh"}
        Activation after each linear layer except the last.
    seed : int
        Seed of the initial parameters.
    dtype : str or numpy.dtype
        Dtype of parameters and computation.
    device : str or Device
        Device of parameters and computation: see `Model`.
    loss : Loss, optional
        Loss that training minimises. The default is `MSE`.

    Raises
    ------
    TypeError
        For sizes that are no sequence; as `Model`.
    ValueError
        If there are fewer than two sizes, one is not an integer >= 1, or the activation is unknown.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        *,
        seed: int = 0,
        dtype: Any = "float64",
        loss: Loss | None = None,
        device: str | Device = "cpu",
    ) -> None:
        try:
            # An iterator could be read only once, and is read twice below.
            sizes = list(sizes)
        except TypeError:
            raise TypeError(
                f"sizes must be a sequence of integers such as [64, 128, 1], got {sizes!r}"
            ) from None
        if len(sizes) < 2 or not all(is_size(size) for size in sizes):
            raise ValueError(f"an MLP needs at least two sizes, all integers >= 1, got {sizes}")
        known = sorted(_ACTIVATIONS)
        if activation not in known:
            raise ValueError(f"activation must be one of {known}, got {activation!r}")
        layers: dict[str, Layer] = {}
        for i, (inputs, outputs) in enumerate(pairwise(int(size) for size in sizes)):
            if i > 0:
                layers[f"{activation}{i - 1}"] = _ACTIVATIONS[activation]()
            # Each initializer keeps the variance of activations constant from layer to layer.
            is_symmetric = activation in {"sigmoid", "tanh"}
            initializer = (
                glorot_uniform(inputs, outputs) if is_symmetric else kaiming_uniform(inputs)
            )
            layers[f"linear{i}"] = Linear(inputs, outputs, initializer=initializer)
        super().__init__(
            Sequential(layers),
            MSE() if loss is None else loss,
            input_shape=(sizes[0],),
            seed=seed,
            dtype=dtype,
            device=device,
        )
