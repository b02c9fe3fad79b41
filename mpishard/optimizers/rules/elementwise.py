"""The rules that update each element alone: SGD, Adagrad, RMSprop, Adam, AdamW and Lion.

Each rule is a dataclass of its settings, with one body below it that NumPy, CuPy and numba run.
In a body ``theta = p[i]`` is one number for numba, and a view of a chunk for NumPy and CuPy, which
``theta -= step`` updates in place. The assignments at the end write the numbers back; of a view
NumPy and CuPy see that it is in its place already. All arrays are read before the first is
written, without which numba's loop is not vectorised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpishard.base import Array, as_flag, as_positive
from mpishard.optimizers.rules.compiled import Body, elements
from mpishard.optimizers.rules.pieces import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, fraction
from mpishard.optimizers.rules.schedules import Schedule


@dataclass(eq=False)
class SGD(Optimizer):
    """``v = momentum * v + g``; ``theta -= learning_rate * v``.

    The heavy ball of Polyak, "Some methods of speeding up the convergence of iteration methods",
    1964, in the form of Sutskever et al., "On the importance of initialization and momentum in
    deep learning", ICML 2013, whose equation 3 ``nesterov`` follows: the step is then
    ``learning_rate * (g + momentum * v)``. Weight decay adds ``weight_decay * theta`` to ``g``.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    momentum : float
        In [0, 1). 0 keeps no state.
    nesterov : bool
        Look ahead along the momentum.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    state_names: ClassVar[tuple[str, ...]] = ("velocity",)
    checks = Optimizer.checks | {"momentum": fraction, "nesterov": as_flag}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")

    def needed_state(self) -> tuple[str, ...]:
        return self.state_names if self.momentum else ()

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        # A number, because all factors of compiled code have the dtype of the arrays.
        nesterov = float(self.nesterov)
        factors = context.gradient_scale, weight_decay, learning_rate, self.momentum, nesterov
        return Body(_sgd, factors)


def _sgd(
    p: Array,
    g: Array,
    v: Array | None,
    scale: float,
    decay: float,
    rate: float,
    momentum: float,
    nesterov: float,
) -> None:
    for i in elements(p.size):
        theta = p[i]
        step = g[i] * scale
        if decay != 0:  # to add 0 would make +0 of -0
            step += theta * decay
        if v is None:
            step *= rate
        else:
            velocity = v[i]
            velocity *= momentum
            velocity += step
            if nesterov != 0:
                step += velocity * momentum
                step *= rate
            else:
                step = velocity * rate
            v[i] = velocity
        theta -= step
        p[i] = theta


@dataclass(eq=False)
class Adagrad(Optimizer):
    """``theta -= learning_rate * g / (sqrt(sum of g**2 so far) + epsilon)``.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 12, 2011, figure 1 with diagonal matrices, no regulariser and epsilon for
    delta. The paper names no defaults; these are PyTorch's. Weight decay adds
    ``weight_decay * theta`` to ``g``.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    epsilon : float
        Added to the root; above 0.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    learning_rate: float | Schedule = 0.01
    epsilon: float = 1e-10

    state_names: ClassVar[tuple[str, ...]] = ("sum_of_squares",)
    checks = Optimizer.checks | {"epsilon": as_positive}

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        return Body(_adagrad, (context.gradient_scale, weight_decay, learning_rate, self.epsilon))


def _adagrad(
    p: Array,
    g: Array,
    sum_of_squares: Array,
    scale: float,
    decay: float,
    rate: float,
    epsilon: float,
) -> None:
    for i in elements(p.size):
        theta, squares = p[i], sum_of_squares[i]
        step = g[i] * scale
        if decay != 0:
            step += theta * decay
        squares += step * step
        root = np.sqrt(squares)
        # Outside of the root, as in PyTorch; a gradient that was always 0 gives a step of 0.
        root += epsilon
        step /= root
        step *= rate
        theta -= step
        p[i], sum_of_squares[i] = theta, squares


@dataclass(eq=False)
class RMSprop(Optimizer):
    """The gradient divided by the root of the running mean of its squares.

    Tieleman and Hinton, "Lecture 6.5 - rmsprop", COURSERA: Neural Networks for Machine Learning,
    2012, whose rates are the defaults (PyTorch's are 0.01 and 0.99). ``centered`` and
    ``momentum`` are those of Graves, "Generating Sequences With Recurrent Neural Networks", 2013
    (arXiv:1308.0850), equations 38 to 41. The lecture has no epsilon, and Graves has it below the
    root; here it is added to the root, as in PyTorch and in Adam. Weight decay adds
    ``weight_decay * theta`` to the gradient.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta2 : float
        Decay rate of the mean of squares, in [0, 1); PyTorch's ``alpha``.
    epsilon : float
        Added to the root; above 0.
    momentum : float
        In [0, 1): of a running sum of the steps. 0 keeps none.
    centered : bool
        Divide by the running standard deviation: subtract the square of the running mean first.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    learning_rate: float | Schedule = 1e-3
    beta2: float = 0.9
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    state_names: ClassVar[tuple[str, ...]] = ("mean_square", "velocity", "mean")
    checks = Optimizer.checks | {
        "beta2": fraction,
        "epsilon": as_positive,
        "momentum": fraction,
        "centered": as_flag,
    }

    def needed_state(self) -> tuple[str, ...]:
        is_needed = {"mean_square": True, "velocity": self.momentum > 0, "mean": self.centered}
        return tuple(name for name in self.state_names if is_needed[name])

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        to_square, to_mean, zero = math.sqrt(1 - self.beta2), 1 - self.beta2, 0.0
        return Body(
            _rmsprop,
            (
                context.gradient_scale,
                weight_decay,
                learning_rate,
                self.beta2,
                to_square,
                to_mean,
                self.epsilon,
                self.momentum,
                zero,
            ),
        )


def _rmsprop(
    p: Array,
    g: Array,
    mean_square: Array,
    v: Array | None,
    mean: Array | None,
    scale: float,
    decay: float,
    rate: float,
    beta2: float,
    to_square: float,
    to_mean: float,
    epsilon: float,
    momentum: float,
    zero: float,
) -> None:
    for i in elements(p.size):
        theta, squares = p[i], mean_square[i]
        step = g[i] * scale
        if decay != 0:
            step += theta * decay
        # (sqrt(1 - beta2) g)**2, which needs no array besides this one.
        root = step * to_square
        root *= root
        squares *= beta2
        squares += root
        if mean is None:
            root = np.sqrt(squares)
        else:
            first = mean[i]
            first *= beta2
            first += step * to_mean
            mean[i] = first
            # A constant gradient has no variance; rounding can make it negative. The zero has
            # the dtype of the arrays, which numba would not give a literal.
            root = np.sqrt(np.maximum(squares - first * first, zero))
        root += epsilon
        step /= root
        if v is None:
            step *= rate
        else:
            velocity = v[i]
            velocity *= momentum
            velocity += step
            step = velocity * rate
            v[i] = velocity
        theta -= step
        p[i], mean_square[i] = theta, squares


@dataclass(eq=False)
class Adam(Optimizer):
    """Moments of the gradient by element.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1. Weight
    decay adds ``weight_decay * theta`` to the gradient, so that the moments see it, as in
    PyTorch; `AdamW` keeps the two apart.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta1, beta2 : float
        Decay rates of the first and second moment, in [0, 1).
    epsilon : float
        Added to the root of the second moment; above 0.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    state_names: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    checks = Optimizer.checks | {"beta1": fraction, "beta2": fraction, "epsilon": as_positive}

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        scale = context.gradient_scale
        if weight_decay:  # then the body scales the gradient before it adds the decay
            factors = self._factors(learning_rate, 1.0, context.step)
        else:
            factors = self._factors(learning_rate, scale, context.step)
        return Body(_adam, (*factors, scale, weight_decay, 1.0))

    def _factors(self, learning_rate: float, scale: float, step: int) -> tuple[float, ...]:
        # Scalars are joined so that few operations are left: with c1 = 1 - beta1^t and
        # c2 = 1 - beta2^t, m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**step)
        return (
            self.beta1,
            self.beta2,
            (1 - self.beta1) * scale,
            math.sqrt(1 - self.beta2) * scale,
            root * self.epsilon,
            learning_rate * root / (1 - self.beta1**step),
        )


class AdamW(Adam):
    """Adam, with a decay that acts on the parameters and not on the moments.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1, with the
    decay of Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm
    2, scaled by the learning rate.

    Parameters are those of `Adam`.
    """

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        scale = context.gradient_scale
        factors = self._factors(learning_rate, scale, context.step)
        return Body(_adam, (*factors, scale, 0.0, 1 - learning_rate * weight_decay))


def _adam(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    beta1: float,
    beta2: float,
    to_m: float,
    to_v: float,
    epsilon: float,
    rate: float,
    scale: float,
    decay: float,
    keep: float,
) -> None:
    for i in elements(p.size):
        theta, first, second = p[i], m[i], v[i]
        gradient = g[i]
        if decay != 0:
            gradient = gradient * scale  # never in place: g belongs to the caller
            gradient += theta * decay
        # Decoupled decay comes before the step, as in PyTorch.
        elif keep != 1:
            theta *= keep
        first *= beta1
        first += gradient * to_m
        root = gradient * to_v
        root *= root
        second *= beta2
        second += root
        root = np.sqrt(second)
        root += epsilon
        root = first / root
        root *= rate
        theta -= root
        p[i], m[i], v[i] = theta, first, second


@dataclass(eq=False)
class Lion(Optimizer):
    """Steps of one length along the sign of the interpolated momentum.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2:
    ``theta -= learning_rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * theta)``, then
    ``m = beta2 * m + (1 - beta2) * g``. It needs a learning rate 3 to 10 times lower than AdamW,
    and a weight decay as much higher (section 5).

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta1, beta2 : float
        Share of the momentum in the step, and its decay rate; in [0, 1).
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    learning_rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    checks = Optimizer.checks | {"beta1": fraction, "beta2": fraction}

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        return Body(
            _lion,
            (
                self.beta1,
                self.beta2,
                (1 - self.beta1) * context.gradient_scale,
                (1 - self.beta2) * context.gradient_scale,
                learning_rate,
                1 - learning_rate * weight_decay,
            ),
        )


def _lion(
    p: Array,
    g: Array,
    m: Array,
    beta1: float,
    beta2: float,
    to_step: float,
    to_m: float,
    rate: float,
    keep: float,
) -> None:
    for i in elements(p.size):
        theta, momentum, gradient = p[i], m[i], g[i]
        # By the momentum from before the update, which therefore comes last.
        step = momentum * beta1
        step += gradient * to_step
        step = np.sign(step)
        step *= rate
        if keep != 1:
            theta *= keep
        theta -= step
        momentum *= beta2
        momentum += gradient * to_m
        p[i], m[i] = theta, momentum
