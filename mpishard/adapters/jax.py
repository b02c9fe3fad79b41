"""Model of a loss function in JAX, which XLA compiles and JAX differentiates."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpishard.adapters.jax_state import JaxState, names_of
from mpishard.adapters.parameter_tree import ParameterTree, flat_leaves
from mpishard.adapters.placed_vector import TreeModel, described
from mpishard.base import Array, Document, Metadata, Scalar, as_count, optional_package, settings
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction, Saved
from mpishard.data import Samples, tree_of
from mpishard.models import ParameterStore
from mpishard.nn import Context

_log = logging.getLogger("mpishard")

_STATE = "state"  # Key in saved choices of the state, as text.


class JaxTree(ParameterTree):
    """Structure of a JAX pytree of floating-point arrays; see `ParameterTree`.

    A leaf's name is the path to it, as in ``params.Dense_0.kernel``. None is not a leaf.

    Parameters
    ----------
    tree : pytree
        Structure and initial values, which are copied.

    Raises
    ------
    TypeError
        If a leaf is not a float or an array of float32 or float64. The message names it.
    ValueError
        If a leaf is float64 without ``jax_enable_x64``, or as for `ParameterTree`.
    """

    def __init__(self, tree: Any) -> None:
        import jax

        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        if not found:
            raise ValueError(f"there is no array in the parameters: {tree!r}")
        # Python floats take the dtype of the arrays. Without arrays it is JAX's default.
        default = jax.dtypes.canonicalize_dtype(np.float64)
        only_floats = all(isinstance(leaf, float) for _, leaf in found)
        leaves = []
        for name, (_, leaf) in zip(names_of(tree, "parameters"), found, strict=True):
            dtype: Any = np.float64 if isinstance(leaf, float) else getattr(leaf, "dtype", None)
            if dtype not in (np.float32, np.float64):
                raise TypeError(
                    f"parameter {name!r} must be a float32 or float64 array, got "
                    f"{type(leaf).__name__ if dtype is None else dtype.name}: only such leaves are "
                    "trained. Leave the others out, and give them to the loss by a closure: of "
                    "Equinox modules equinox.partition(module, equinox.is_inexact_array) takes "
                    'them apart, of Flax variables pass those of "params", of Flax NNX modules '
                    "nnx.split(module, nnx.Param, ...)"
                )
            host = default.type(leaf) if only_floats else leaf
            leaves.append((name, host if isinstance(host, float) else np.asarray(host)))
        self.entries, self.dtype, self.first_values = flat_leaves(leaves)
        if self.dtype != np.float32 and default != np.float64:
            raise ValueError(
                "the parameters are float64, and JAX would compute in float32: call "
                'jax.config.update("jax_enable_x64", True) first, or give float32 arrays'
            )

    def build(self, leaves: Sequence[object]) -> Any:
        return self._structure.unflatten(leaves)

    def values(self, vector: Array) -> Any:
        """Return the tree of a flat vector's values (sum of sizes,), copied to JAX arrays."""
        import jax.numpy as jnp

        return self.build([jnp.array(entry.view(vector)) for entry in self.entries])


class JaxModel(TreeModel):
    """Model from a loss function that is written in JAX.

    The parameters are any pytree that the function takes: Flax and Haiku dicts, or an Equinox
    module whose other leaves are None. End to end they are the flat vector. When the model is
    sharded they are in memory that the ranks of a node share. XLA reads a parameter there in place
    if its address is a multiple of 64 bytes, for instance if all leaves before it have multiples of
    16 float32 elements. Each step copies the other parameters.

    XLA computes loss and gradient together, and keeps the whole gradient until the gradients of all
    leaves are copied to memory that the node's ranks can read. They are reduced unit by unit.

    Each leaf has a name, which ``parameter_options``, checkpoints and reports use:
    ``{"dense": {"kernel": ..}}`` has ``dense.kernel``. Leaves are in JAX's order, which sorts keys.

    Parameters
    ----------
    loss : callable
        ``loss(parameters, x, y)`` returns a scalar, the *mean* over the samples of x. ``jax.jit``
        compiles it once for each shape of x and y. It may be jitted already. x and y are arrays, or
        the trees of `mpishard.data.Samples`. With ``state`` it is ``loss(parameters, state, keys,
        x, y)``, and returns the mean and the new state.
    parameters : pytree
        Initial values: float32 or float64 arrays and Python floats, of one dtype. They are copied.
    predict : callable, optional
        ``predict(parameters, x)``, for the method `predict`, and for gradients of another loss. It
        is compiled, too. With ``state`` it is ``predict(parameters, state, x)``.
    state : pytree, optional
        First values of what each training pass returns anew and does not train, such as running
        means; ``{}`` if the loss needs ``keys`` only. After each step the ranks' states become one:
        floats are averaged by numbers of samples, and others must be equal. Checkpoints have it.
    seed : int
        Origin of ``keys``, one for each sample of x:
        ``fold_in(fold_in(jax.random.key(seed), step), index)`` with the number of steps before, and
        the sample's index in the batch of all ranks. In evaluation ``keys`` is None, and the state
        that the loss returns is not used. A plain model does not count steps.
    loss_is_sum : bool
        True if the loss is the *sum* over the samples. Then gradients are added over ranks, and not
        averaged, as those of one process with all samples.

    Raises
    ------
    ImportError
        If JAX is not installed.
    RuntimeError
        If JAX's default device is not the CPU.
    TypeError, ValueError
        If an argument is not as described, or a parameter is float64 without ``jax_enable_x64``.
        The message names the parameter, or the leaf of the state.

    Notes
    -----
    `mpishard.init` gives XLA as many threads as this rank has cores, if it is called before the
    first array of JAX is made. Thread-ranks share one pool of threads.

    Examples
    --------
    A linear model::

        def loss(parameters, x, y):
            return jnp.mean((x @ parameters["slope"] + parameters["offset"] - y) ** 2)

        model = ms.adapters.JaxModel(loss, {"slope": jnp.zeros(2), "offset": 0.0})
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        parameters: Any,
        predict: Callable[..., Any] | None = None,
        *,
        state: Any = None,
        seed: int = 0,
        loss_is_sum: bool = False,
    ) -> None:
        jax = optional_package("jax", "JaxModel", "jax")
        super().__init__(JaxTree(parameters), loss, predict, loss_is_sum)
        self._has_state = state is not None
        own_state = self._state = JaxState(state, self._dtype)
        self._seed = as_count("seed", seed, least=0)
        if jax.default_backend() != "cpu":
            raise RuntimeError(
                "mpishard computes with JAX on the CPU, and JAX's default here is "
                f"{jax.default_backend()!r}: set JAX_PLATFORMS=cpu before JAX is imported"
            )

        # All compiled functions take the state, which has no leaf if there is none.
        def value_of(tree: Any, state: Any, keys: Any, x: Any, y: Any) -> tuple[Any, Any]:
            if not self._has_state:
                return _checked_value(loss(tree, x, y), False), []
            value, *new = _pair(loss(tree, state, keys, x, y))
            return _checked_value(value, True), own_state.checked(*new)

        def loss_sum(tree: Any, state: Any, place: Any, x: Any, y: Any) -> tuple[Any, Any]:
            first = jax.tree_util.tree_leaves(x)[0]
            value, new = value_of(tree, state, _keys(place, len(first)), x, y)
            # The gradient is that of the sum over samples, which is summed over ranks and, for a
            # mean, divided by the number of all samples later.
            return value * self._factor(first), (value, new)

        def predicted(tree: Any, state: Any, x: Any) -> Any:
            assert predict is not None
            return predict(tree, state, x) if self._has_state else predict(tree, x)

        def pull_back(tree: object, x: object, cotangent: object) -> Any:
            return jax.vjp(lambda tree: predicted(tree, {}, x), tree)[1](cotangent)[0]

        # The jitted functions are called with the NumPy views themselves. `jit` reads aligned views
        # in place, but jnp.asarray would copy them.
        self._differentiated = jax.jit(jax.value_and_grad(loss_sum, has_aux=True))
        self._pulled_back = jax.jit(pull_back)
        self._loss = _on_host(jax.jit(lambda p, state, x, y: value_of(p, state, None, x, y)[0]))
        self._predict = None if predict is None else _on_host(jax.jit(predicted))

    def place_parameters(self, arrays: Sequence[Array], holder: str, store: ParameterStore) -> None:
        super().place_parameters(arrays, holder, store)
        allowed = settings.xla_threads()
        names = []
        for task in Path("/proc/self/task").glob("*"):
            with suppress(OSError):  # The thread has just ended.
                names.append((task / "comm").read_text().strip())
        # XLA gives this name to the threads of its pool.
        threads = names.count("tf_XLAEigen")
        if allowed is not None and threads > allowed:
            _log.warning(
                "XLA has %d threads in each rank, and %d would be enough: JAX made its first array "
                "before mpishard.init(). Call init() or launch() before, or set NPROC=%d",
                threads,
                allowed,
                allowed,
            )

    # ---------------------------------------------------------------------- beside parameters

    def state_tree(self) -> Any:
        """Return a copy of the state in its tree; None if the model was made without one."""
        import jax

        return jax.tree_util.tree_map(jax.numpy.array, self._state.tree)

    def with_parameters(self, parameters: Array) -> Self:
        model = super().with_parameters(parameters)
        model._state = copy.copy(self._state)
        return model

    @property
    def is_random(self) -> bool:
        return self._has_state

    def distribute_state(self, world: CommunicationBackend, ranks: CommunicationBackend) -> None:
        self._state.distribute(world)
        self._seed = int(world.broadcast(np.array([self._seed]))[0])

    def share_changed_state(self, ranks: CommunicationBackend) -> bool:
        self._state.share(ranks)
        return bool(self._state.leaves)

    def kept_state(self) -> object:
        return copy.copy(self._state)

    def restore_state(self, kept: object) -> None:
        vars(self._state).update(vars(kept))

    def choices(self) -> Document:
        """Return the state."""
        return {_STATE: self._state.to_text()} if self._state.leaves else {}

    def check_choices(self, choices: Metadata) -> None:
        """Refuse the state of another model, naming one value."""
        super().check_choices({n: v for n, v in choices.items() if n != _STATE})
        if _STATE in choices:
            self._state.values_in(choices[_STATE])

    def take_choices(self, choices: Metadata) -> None:
        """Restore the state; without any, the model keeps its own."""
        if _STATE in choices:
            self._state.leaves = self._state.values_in(choices[_STATE])

    # ---------------------------------------------------------------------------------- computing

    @property
    def _given(self) -> tuple[Any, ...]:
        return self._parameters, self._state.tree

    def check_input(self, x: object) -> None:
        if not isinstance(x, Samples) and not getattr(x, "shape", ()):
            raise TypeError(
                f"x must be one array of samples, got {type(x).__name__}; give several inputs as "
                "mpishard.data.Samples(x)"
            )
        super().check_input(x)

    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None, context: Context
    ) -> tuple[Scalar, Scalar, Saved]:
        # XLA would compile a program for no sample, whose mean is NaN.
        if len(x) == 0:
            return 0.0, 0.0, None
        if loss is None:
            place = np.array([self._seed, context.step, context.sample_start]).astype(np.uint32)
            try:
                (_, (value, new)), gradients = self._differentiated(
                    *self._given, place, tree_of(x), tree_of(y)
                )
            except Exception as error:
                if type(error).__name__ == "TraceContextError":
                    raise TypeError(_OTHER_TRACE) from error
                raise
            self._state.take(new, len(x))
            return float(value) * self._factor(x), float(len(x)), lambda: gradients
        if self._has_state:
            raise ValueError(
                "a JaxModel with state trains by its own loss, which returns the new state; pass "
                f"no loss_function, got {type(loss).__name__}"
            )
        total, weight, saved = loss.forward(self.predict(x), y)
        return (
            total,
            weight,
            lambda: self._pulled_back(self._parameters, tree_of(x), loss.backward(saved)),
        )

    def backward_pass(self, saved: Saved, receive: Callable[[int, Array], None]) -> None:
        import jax

        gradients = jax.tree_util.tree_leaves(saved())
        # The last parameter comes first, as in the backward pass of a layered model.
        for index in reversed(range(len(gradients))):
            receive(index, np.asarray(gradients[index]).reshape(-1))


_OTHER_TRACE = (
    "the loss changes a Flax NNX module that was made outside of it, which JAX's transformations "
    "cannot: make it anew inside the loss, by nnx.merge(graph, parameters, state, rest, copy=True)"
)


def _pair(result: Any) -> Any:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(
        "loss(parameters, state, keys, x, y) must return the mean and the new state; got "
        + (described(result) if not hasattr(result, "aval") else str(result.aval))
    )


def _checked_value(value: Any, has_state: bool) -> Any:
    if getattr(value, "shape", None) == () and value.dtype.kind == "f":
        return value
    is_aux = isinstance(value, tuple) and not has_state
    raise TypeError(
        "loss(parameters, x, y) must return one float, the mean over samples; got "
        + (described(value) if not hasattr(value, "shape") else str(value.aval))
        + (_AUX if is_aux else "")
    )


_AUX = (
    ". Give values that it returns beside the mean as JaxModel(..., state=first values), and the "
    "loss becomes loss(parameters, state, keys, x, y)"
)


def _keys(place: Any, samples: int) -> Any:
    """Return the keys of samples, for a seed, a step and the index of the first sample."""
    import jax

    key = jax.random.fold_in(jax.random.key(place[0]), place[1])
    indices = place[2] + jax.numpy.arange(samples, dtype=np.uint32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(indices)


def _on_host(function: Callable[..., object]) -> Callable[..., Any]:
    """Return the function with its result copied to a NumPy array, which is writable."""
    return lambda *arguments: np.array(function(*arguments))
