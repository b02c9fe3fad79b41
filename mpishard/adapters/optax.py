"""Update rule made of an optax transformation, for the elements that a rank owns."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.base import Document, optional_package
from mpishard.optimizers import JointRule, ParameterOptions, PieceViews, UpdateContext

_EXAMPLE = np.zeros(2, np.float32)
_SIDE = 128  # Rows and columns of the trial matrix; optax's Adafactor does not factor smaller ones.
# Factors of the trial's gradients: any usual limit clips some. The last gradient has a NaN.
_SCALES = (1.0, 1e-6, 1e6, 1e12, 1.0)
_MASKS = (
    "In place of masks and labels use parameter_options: frozen and learning_rate_scale here, "
    'weight_decay with a rule such as mpishard.optimizers.AdamW(1e-3, parameter_options={"*.bias": '
    '{"weight_decay": 0.0}})'
)
_TOLERANCE = 1e-4  # Allowed difference, relative to the step's largest update, in float32.


class OptaxRule(JointRule):
    """Update rule of an optax transformation that is element-wise, such as ``optax.adamw(1e-3)``.

    Each rank updates the elements that it owns, and holds their state. Counts and other numbers
    of the state are the same on all ranks. Both are saved in checkpoints, which any world size can
    read. The learning rate, its schedule and weight decay are the transformation's own.
    `learning_rate` of this rule is 1, a factor of the updates.

    A transformation that combines elements would use only a rank's part of the parameters. The
    constructor detects it by a trial: two halves of a matrix are updated separately, and the
    results must equal the update of the whole matrix.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        Transformation, whose state consists of arrays like the parameters, of their dtype, and
        numbers. ``optax.clip_by_global_norm(c)`` as the first link of ``optax.chain`` is taken as
        ``clip_global_norm=c``: the norm is that of all ranks' elements.
    clip_global_norm : float, optional
        As in `Optimizer`. It replaces ``optax.clip_by_global_norm``.
    parameter_options : mapping, optional
        As in `Optimizer`, with the keys ``frozen`` and ``learning_rate_scale``. It replaces
        ``optax.masked``.

    Raises
    ------
    ImportError
        If JAX is not installed.
    TypeError
        If the argument is not a transformation, or cannot be applied to a vector.
    ValueError
        If the transformation combines elements, as ``lamb``, ``adafactor``, ``muon``, and
        ``clip_by_global_norm`` in another place do; draws random numbers, as ``add_noise`` does;
        or has a state of other arrays. Also if there are other options.
    """

    updates_unused = True

    def __init__(
        self,
        transformation: Any,
        *,
        clip_global_norm: float | None = None,
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        jax = optional_package("jax", "OptaxRule", "jax")
        if not all(callable(getattr(transformation, name, None)) for name in ("init", "update")):
            raise TypeError(
                "transformation must be an optax.GradientTransformation, such as "
                f"optax.adamw(1e-3), got {type(transformation).__name__}"
            )
        transformation, limit = _without_clip(transformation)
        if limit is not None:
            if clip_global_norm is not None:
                raise ValueError(
                    f"the chain begins with clip_by_global_norm({limit:g}), and clip_global_norm "
                    f"is {clip_global_norm}: give one of the two"
                )
            clip_global_norm = limit
        super().__init__(
            1.0, clip_global_norm=clip_global_norm, parameter_options=parameter_options
        )
        for pattern, values in self.checked_options.items():
            if unfit := {"learning_rate", "weight_decay"} & values.keys():
                raise ValueError(
                    f"parameter_options[{pattern!r}]: {unfit.pop()} is the transformation's own; "
                    f"learning_rate_scale and frozen can differ between parameters. {_MASKS}"
                )
        self.transformation = transformation
        try:
            state = jax.eval_shape(transformation.init, _EXAMPLE)
            found, self._structure = jax.tree_util.tree_flatten_with_path(state)
            self._leaves: dict[str, Any] = {
                jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found
            }
            is_key = jax.dtypes.prng_key
            keys = [
                n for n, leaf in self._leaves.items() if jax.dtypes.issubdtype(leaf.dtype, is_key)
            ]
            trial = None if keys else _trial(transformation)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise TypeError(
                f"the transformation cannot be applied to one vector. {_MASKS}. JAX raised: {error}"
            ) from error
        if trial is None:
            raise ValueError(
                f"the transformation draws random numbers, with the key in its state {keys[0]!r}: "
                "each rank would draw the same ones for its own part, so that an update would "
                "depend on the number of ranks. Leave the noise out, or add it to the gradients"
            )
        self._mark, is_elementwise = trial
        if not is_elementwise:
            raise ValueError(
                "the transformation looks at more than one element at a time (norms, matrices): "
                "each rank has a part of the elements, and would compute another update. To clip, "
                "write OptaxRule(optax.adamw(1e-3), clip_global_norm=1.0), or begin the chain with "
                "optax.clip_by_global_norm(1.0); mpishard.optimizers.LAMB has norms over all "
                f"ranks. {_MASKS}"
            )
        for name, leaf in self._leaves.items():
            # A fixed dtype is accepted here, because the parameters, which are not known yet, may
            # have it. `_update_part` checks it.
            is_vector = leaf.shape == _EXAMPLE.shape and leaf.dtype in (np.float32, np.float64)
            if not is_vector and (leaf.shape or leaf.dtype.kind not in "fiub"):
                raise ValueError(
                    f"the transformation's state {name!r} is {leaf.dtype.name} of shape "
                    f"{leaf.shape} for parameters of float32 and shape (2,): only arrays like the "
                    "parameters, and numbers, can be divided among ranks"
                )

        def advance(
            parameters: Any, gradients: Any, state: list[Any], scale: Any, rate: Any
        ) -> tuple[Any, list[Any]]:
            tree = self._structure.unflatten(state)
            updates, tree = transformation.update(gradients * scale, tree, parameters)
            return parameters + rate * updates, jax.tree_util.tree_leaves(tree)

        self._advance = jax.jit(advance)
        self._first_state = jax.jit(
            lambda parameters: jax.tree_util.tree_leaves(transformation.init(parameters))
        )

    def needed_state(self) -> tuple[str, ...]:
        return tuple(name for name, leaf in self._leaves.items() if leaf.shape)

    def fingerprint(self) -> Document:
        # The settings are hidden in closures. Two transformations differ if their updates differ.
        return {**super().fingerprint(), "transformation": self._mark}

    def update_all(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Update all pieces of this rank in place.

        Raises
        ------
        NotImplementedError
            If the rule is used without a model, which would keep the counts.
        ValueError
            If JAX computes in float32 for float64 parameters, or a state has another dtype than
            the parameters.
        """
        if context.loss is None:
            raise NotImplementedError(
                "an optax transformation keeps its counts with a model: use optimize, or a sharded "
                "optimizer's step, in one process too"
            )
        # Every part starts with the numbers before the step, so that counts advance once per step.
        before, after = context.numbers, dict[str, Any]()
        for owned in pieces:
            for options in self._options_of(owned.segments):
                part = slice(options.start, options.stop)
                rate = self._rate_in(options, context)
                after = self._update_part(owned, part, rate, before, context)
        vectors = [leaf.dtype for leaf in self._leaves.values() if leaf.shape]
        if not after and len(vectors) < len(self._leaves):
            # This rank has no elements. An update of one dummy element advances the counts, which
            # must be the same on all ranks.
            nothing = np.zeros(1, np.result_type(np.float32, *vectors))
            state = {name: nothing.copy() for name in self.needed_state()}
            nowhere = PieceViews(nothing, nothing.copy(), state, [])
            after = self._update_part(nowhere, slice(None), 0.0, before, context)
        before.update(after)

    def _update_part(
        self,
        owned: PieceViews,
        part: slice,
        rate: float,
        before: Mapping[str, object],
        context: UpdateContext,
    ) -> dict[str, Any]:
        """Update one part of a piece, and return the numbers of the state after it."""
        parameters, gradients = owned.parameters[part], owned.gradients[part]
        vectors = {name: vector[part] for name, vector in owned.state.items()}
        if context.step == 1:
            leaves = self._first_state(parameters)
        else:
            leaves = [
                vectors[name]
                if leaf.shape
                # An injected rate has the dtype of the parameters.
                else np.asarray(
                    before[name], parameters.dtype if leaf.dtype.kind == "f" else leaf.dtype
                )
                for name, leaf in self._leaves.items()
            ]
        updated, leaves = self._advance(parameters, gradients, leaves, context.gradient_scale, rate)
        if updated.dtype.itemsize < parameters.dtype.itemsize:
            raise ValueError(
                f"the parameters are {parameters.dtype.name}, and JAX computes in "
                f'{updated.dtype.name}: call jax.config.update("jax_enable_x64", True) first'
            )
        for name, leaf in zip(self._leaves, leaves, strict=True):
            if leaf.shape and leaf.dtype != parameters.dtype:
                raise ValueError(
                    f"the transformation's state {name!r} is {leaf.dtype.name}, and the parameters "
                    f"are {parameters.dtype.name}: only a state of their dtype is kept. Make the "
                    "transformation with it, as optax.MultiSteps(..., "
                    f'accumulator_dtype="{parameters.dtype.name}")'
                )
        after = {}
        parameters[...] = updated
        for (name, leaf), found in zip(self._leaves.items(), leaves, strict=True):
            if leaf.shape:
                vectors[name][...] = found
            else:
                after[name] = found.item()
        return after


def _without_clip(transformation: Any) -> tuple[Any, float | None]:
    """Return a chain without ``clip_by_global_norm(limit)`` at its beginning, and the limit.

    Any other transformation is returned as it is, with None.
    """
    # optax keeps the links of a chain, and the limit, in closures alone. If another version keeps
    # them elsewhere, nothing is found here, and the trial refuses the chain.
    inits = _variables(transformation.init).get("init_fns", ())
    updates = _variables(transformation.update).get("update_fns", ())
    if len(updates) < 2 or len(inits) != len(updates):
        return transformation, None
    first = updates[0]
    if "tx" in _variables(first):  # optax lets it take the arguments of the other links
        first = _variables(first)["tx"].update
    name = getattr(first, "__qualname__", "")
    if name != "clip_by_global_norm.<locals>.update_fn" or not first.__module__.startswith("optax"):
        return transformation, None
    link = type(transformation)
    rest = [link(*pair) for pair in zip(inits[1:], updates[1:], strict=True)]
    chain = importlib.import_module("optax").chain
    return chain(*rest), float(_variables(first)["max_norm"])


def _variables(function: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


def _trial(transformation: Any) -> tuple[str, bool]:
    """Return some updates as text, and True if each update depends only on its own element.

    Two halves of a matrix, updated separately, must become what the whole matrix becomes.
    """
    import jax

    generator = np.random.default_rng(0)
    start = generator.standard_normal((_SIDE, _SIDE)).astype(np.float32)
    gradients = [
        (scale * generator.standard_normal(start.shape)).astype(np.float32) for scale in _SCALES
    ]
    gradients[-1][0, 0] = np.nan
    half = start.size // 2
    update, found = jax.jit(transformation.update), []
    for part, shape in (
        (slice(None), start.shape),
        (slice(half), (half,)),
        (slice(half, None), (half,)),
    ):
        parameters = start.ravel()[part].reshape(shape)
        state = transformation.init(parameters)
        steps = []
        for gradient in gradients:
            # Numbers are compared before the last step, as optax.zero_nans then notes a NaN in its
            # state, which only one half has.
            counts = [
                float(leaf) for leaf in jax.tree_util.tree_leaves(state) if np.ndim(leaf) == 0
            ]
            updates, state = update(gradient.ravel()[part].reshape(shape), state, parameters)
            parameters = parameters + updates
            steps.append(np.ravel(updates))
        found.append((np.array(steps), counts))
    (whole, counts), *halves = found
    joined = np.concatenate([steps for steps, _ in halves], axis=1)
    largest = np.abs(np.nan_to_num(whole)).max(axis=1, keepdims=True)
    is_alike = (np.abs(joined - whole) <= _TOLERANCE * largest) | np.isnan(joined) & np.isnan(whole)
    is_elementwise = bool(is_alike.all()) and all(own == counts for _, own in halves)
    return " ".join(f"{value:.3g}" for value in whole[:-1, 0]), is_elementwise
