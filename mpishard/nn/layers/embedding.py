"""Lookup tables of vectors, for tokens and for positions.

Shape suffixes: B batch, T time, D width, V vocabulary, C context length, N all tokens of the
input in one dim, U distinct tokens among them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    array_namespace,
    check_sizes,
    is_device_array,
    to_host,
    wide,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes
from mpishard.nn.checks import refuse_if_any
from mpishard.nn.layers.initializers import normal
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    SavedActivations,
    unwritten,
)
from mpishard.nn.passes import added


class Embedding(Layer):
    """Table with a vector for each token: y = W[tokens].

    Parameters
    ----------
    vocabulary_size, width : int
        Sizes V and D of the table W of shape (V, D).
    initializer : Initializer, optional
        Initializer of W. The default is normal with standard deviation 0.02, as in GPT-2.

    Raises
    ------
    ValueError
        If a size is not an integer >= 1.
    """

    category = LayerCategory.EMBEDDING
    computes_bfloat16 = True
    _flops_per_output = 0  # Rows are only copied.

    def __init__(
        self, vocabulary_size: int, width: int, initializer: Initializer | None = None
    ) -> None:
        check_sizes("Embedding", vocabulary_size=vocabulary_size, width=width)
        self.vocabulary_size = vocabulary_size
        self.width = width
        initializer = normal(0.02) if initializer is None else initializer
        self._weight = ParameterSpec((vocabulary_size, width), initializer)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (vocabulary_size, width)."""
        return {"weight": self._weight}

    @property
    def takes_integers(self) -> bool:
        """True, because tokens are integers."""
        return True

    def check_input(self, x: Array) -> None:
        """Refuse arrays of other dtypes than integers, and tokens outside [0, V)."""
        # Refuses objects that are no arrays, with the error that names the conversion.
        array_namespace(x)
        if x.dtype.kind not in "iu":
            raise TypeError(f"Embedding takes integer tokens, got an array of {x.dtype}")
        if is_device_array(x):
            # The host reads one count, and the tokens only if it is not 0.
            outside = device_passes.count_outside(x, self.vocabulary_size)
            refuse_if_any(outside, lambda: self._refuse_outside(to_host(x)))
        elif x.size:
            # NumPy counts negative indices from the end: it would return the last row for -1.
            self._refuse_outside(x)

    def _refuse_outside(self, x: Array) -> None:
        for token in (int(x.min()), int(x.max())):
            if not 0 <= token < self.vocabulary_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary [0, {self.vocabulary_size})"
                )

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., width) for the shape (...): each token becomes a vector."""
        return (*input_shape, self.width)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the tokens."""
        return SavedActivations(keeps_input=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Look up integer tokens of any shape, and save them.

        On a GPU a token outside [0, V) gives NaN here, because the host would have to wait for a
        check. `check_input` refuses it.
        """
        if is_device_array(x):
            return device_passes.take_rows(p["weight"], x), x if context.training else None
        # The check is repeated for layers that are not the first. It takes microseconds, and NumPy
        # would silently take a negative index from the table's end.
        self.check_input(x)
        return p["weight"].take(x, axis=0), x if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[None, Saved]:
        """Return no input gradient (None), because tokens have none."""
        return None, (saved, dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add each row of dy to the gradient of its token's row."""
        tokens, dy = pending
        add_rows(g["weight"], tokens.reshape(-1), wide(dy).reshape(-1, self.width))


def add_rows(table_VD: Array, tokens_N: Array, dy_ND: Array) -> None:
    """Add each row of dy to the table's row of its token.

    The rows of a token are summed in the order of the batch, so that the result is the same in
    every run. On the host a stable sort brings them together, because addition at scattered indices
    would be slow.
    """
    if not tokens_N.size:
        return
    if is_device_array(dy_ND):
        xp = NAMESPACES[type(dy_ND)]
        device_passes.add_rows(table_VD, tokens_N, xp.ascontiguousarray(dy_ND))
        return
    order_N = np.argsort(tokens_N, kind="stable")
    tokens_N = tokens_N[order_N]
    first_N = np.ones(tokens_N.shape, dtype=bool)
    first_N[1:] = tokens_N[1:] != tokens_N[:-1]
    starts_U = np.flatnonzero(first_N)
    # These tokens are distinct: with equal indices, += would keep only one of the additions.
    table_VD[tokens_N[starts_U]] += np.add.reduceat(dy_ND[order_N], starts_U, axis=0)


class PositionalEmbedding(Layer):
    """Table with a learned vector for each position: y = x + P[:T].

    Parameters
    ----------
    context_length, width : int
        Sizes C and D of the table P of shape (C, D). Inputs have T <= C positions.
    initializer : Initializer, optional
        Initializer of P. The default is normal with standard deviation 0.02, as in GPT-2.

    Raises
    ------
    ValueError
        If a size is not an integer >= 1.
    """

    category = LayerCategory.EMBEDDING
    computes_bfloat16 = True

    def __init__(
        self, context_length: int, width: int, initializer: Initializer | None = None
    ) -> None:
        check_sizes("PositionalEmbedding", context_length=context_length, width=width)
        self.context_length = context_length
        self.width = width
        initializer = normal(0.02) if initializer is None else initializer
        self._weight = ParameterSpec((context_length, width), initializer)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (context_length, width)."""
        return {"weight": self._weight}

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape (T, width), with T at most the context length."""
        if (
            len(input_shape) != 2
            or input_shape[0] > self.context_length
            or input_shape[1] != self.width
        ):
            raise ValueError(
                f"PositionalEmbedding needs samples of shape (T <= {self.context_length}, "
                f"{self.width}), got {input_shape}"
            )
        return input_shape

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none."""
        return SavedActivations()

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Add P[:T] to each sample of x_BTD, or P[S : S + T] after S cached positions.

        Raises
        ------
        ValueError
            If the table has fewer positions.
        """
        # Refuses more positions than the table has, before NumPy would broadcast a short slice.
        self.output_shape(x.shape[1:])
        # Sequences of a cache have different lengths: each row continues at its own position.
        starts = [0] if context.cache is None else context.cache.starts
        longest = max(starts, default=0)
        if longest + x.shape[1] > self.context_length:
            raise ValueError(
                f"{longest} positions are cached and {x.shape[1]} more are given; "
                f"PositionalEmbedding has {self.context_length}"
            )
        if len(starts) < 2:
            return added(x, p["weight"][longest : longest + x.shape[1]]), None
        xp = NAMESPACES[type(x)]
        positions_BT = xp.asarray(starts)[:, None] + xp.arange(x.shape[1])
        return added(x, p["weight"][positions_BT]), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return ``dy`` itself; pending is its sum over the batch, an array of its own."""
        # Summed now, because the layer before may overwrite dy in place.
        return dy, wide(dy).sum(axis=0)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the sum over the batch to the first T rows."""
        length = pending.shape[0]
        dw_CD = unwritten(g, "weight")
        if dw_CD is None:
            dw_TD = g["weight"][:length]
            dw_TD += pending
            return
        dw_CD[:length] = pending
        if length < self.context_length:
            # Positions that the batch does not have; the memory holds old values.
            dw_CD[length:] = 0
