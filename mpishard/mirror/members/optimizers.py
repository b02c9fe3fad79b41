"""Documented members of update rules: their own state, given gradients, options and bytes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from mpishard.base import Array, check_path, require_type
from mpishard.mirror.interfaces import ICheckpointableModel, IGradientBasedOptimizer

if TYPE_CHECKING:
    from mpishard.contracts import PathLike
    from mpishard.mirror.optimizer_options import OptimizationAlgorithmOptions
    from mpishard.optimizers import PlainTraining

    class _DocumentedOptimizer(ICheckpointableModel, IGradientBasedOptimizer):
        """What type checkers see: the interfaces, and the native members that these use."""

        algorithm_options: Any

        def rate_of_step(self, step: int) -> float: ...
        def _settings(self) -> dict[str, object]: ...
        @property
        def _own(self) -> PlainTraining: ...

else:
    _DocumentedOptimizer = object

__all__ = ["OptimizerMembers"]

_Model = TypeVar("_Model")


@ICheckpointableModel.register
@IGradientBasedOptimizer.register
class OptimizerMembers(_DocumentedOptimizer):
    """What the documented hierarchy has of an optimizer that is not sharded."""

    @classmethod
    def from_options(cls, options: OptimizationAlgorithmOptions, **settings: Any) -> Self:
        """Return an optimizer with the options of the mirrored hierarchy, and their defaults.

        Parameters
        ----------
        options : OptimizationAlgorithmOptions
            Rate, clipping, and the end of `optimize` unless its data name an earlier one.
        **settings
            Arguments of the rule, which win over the options.

        Raises
        ------
        TypeError
            For options of another type.
        ValueError
            For options of another rule than this one.
        """
        from mpishard.mirror.optimizer_options import OptimizationAlgorithmOptions

        require_type("options", options, OptimizationAlgorithmOptions)
        given = options.rule_settings()
        # AdamOptimizerOptions, for one, have beta1, which SGD does not take.
        unknown = given.keys() - inspect.signature(cls).parameters.keys()
        if unknown:
            raise ValueError(
                f"{type(options).__name__} has {', '.join(sorted(unknown))}, which {cls.__name__} "
                "does not take; use OptimizationAlgorithmOptions"
            )
        made = cls(**(given | settings))
        made.algorithm_options = options
        return made

    def get_options(self) -> Mapping[str, object]:
        """Return the settings: the arguments of ``__init__`` that are kept under their names.

        Arguments of the bases count; other attributes, such as counts of a rule, do not.
        """
        return self._settings()

    def should_early_stop(self) -> bool:
        """Return whether training should end now; a subclass may say so."""
        return False

    def set_model(self, model: object) -> None:
        """Name the model that `optimize` trains if its data has none.

        `update_parameters` takes a vector of its length for its parameters, with their names.

        Raises
        ------
        TypeError
            For None.
        ValueError
            For a pattern of ``parameter_options`` that matches none of its parameters.
        """
        self._own.set_model(model)

    @property
    def model(self) -> Any:
        """The model given to `set_model`; None before."""
        return self._own.model

    @property
    def last_computed_gradients(self) -> Array | None:
        """The gradient of the last own update, shape (n,), before clipping; None before one."""
        return self._own.gradients

    def get_current_learning_rate(self) -> float:
        """Return the rate of the next own update; a sharded optimizer counts its own."""
        return self.rate_of_step(self._own.steps)

    @overload
    def update_parameters(self, parameters: Array, gradients: Array) -> Array: ...
    @overload
    def update_parameters(
        self, parameters: Sequence[Array], gradients: Sequence[Array]
    ) -> list[Array]: ...
    def update_parameters(
        self, parameters: Array | Sequence[Array], gradients: Array | Sequence[Array]
    ) -> Array | list[Array]:
        """Make one update with the own state; the arguments stay as they are.

        Parameters
        ----------
        parameters : Array or sequence of Array
            Of any shapes. In ``parameter_options`` a single array is called "parameters", those
            of a sequence, such as one per layer, "0", "1", ...; a vector as long as `model` has
            its names.
        gradients : Array or sequence of Array
            The mean gradient, of the same shapes and dtype.

        Returns
        -------
        Array or list of Array
            The updated parameters.

        Raises
        ------
        TypeError
            For other dtypes than one of float16, float32 and float64.
        ValueError
            For shapes that differ from each other's or the last own update's, or a pattern of
            ``parameter_options`` that matches nothing.
        """
        return self._own.update_parameters(parameters, gradients)

    @overload
    def apply_gradients(self, gradients: Array, model: _Model, /) -> _Model: ...
    @overload
    def apply_gradients(
        self, original_parameters: Array, gradients: Array, model: _Model, /
    ) -> _Model: ...
    def apply_gradients(self, *given: Any) -> Any:
        """Make one update of a model with the own state, and return the model.

        ``apply_gradients(gradients, model)`` begins at the model's parameters,
        ``apply_gradients(original_parameters, gradients, model)`` at those from before a step
        that the model has made meanwhile.

        Parameters
        ----------
        *given : Array or object
            The arguments of one of these two forms. The arrays have shape (parameter_count,);
            ``gradients`` is the mean gradient. ``model`` has ``get_parameters`` and
            ``set_parameters``. For a sharded model they are collective, and every rank keeps
            the whole state; wrap the optimizer instead.

        Raises
        ------
        TypeError, ValueError
            As `update_parameters`; the model is unchanged.
        ShardingError
            For another model than that of the own state.
        """
        from mpishard.mirror import plain_rules

        return plain_rules.apply_gradients(self._own, *given)

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Return the parameters before the last own update; the state goes back with them.

        Parameters
        ----------
        updated, gradients : Array
            Result and gradient of that update, single arrays of one shape.

        Returns
        -------
        Array
            The parameters that it was given, but for rounding.

        Raises
        ------
        RuntimeError
            Without an update to reverse, or if it cannot be reversed: the earlier parameters must
            follow from the updated ones, so learning rate times weight decay must be below 1.
        ValueError
            For other gradients than that update's.
        """
        from mpishard.mirror import plain_rules

        return plain_rules.reverse_update(self._own, updated, gradients)

    def serialize(self) -> bytes:
        """Return settings, own state and step count, in safetensors format.

        Raises
        ------
        ValueError
            If a learning rate is a function that is no schedule of `mpishard.optimizers`.
        """
        from mpishard.mirror import plain_rules

        return plain_rules.serialize(self._own)

    def deserialize(self, data: bytes) -> None:
        """Take settings, own state and step count from bytes of `serialize`.

        Raises
        ------
        ValueError
            For other bytes, or those of another rule; nothing has changed then.
        """
        from mpishard.mirror import plain_rules

        plain_rules.deserialize(self._own, data)

    def save_model(self, path: PathLike) -> None:
        """Write the bytes of `serialize` to a file; a sharded optimizer writes a directory.

        Raises
        ------
        TypeError, ValueError
            For an argument that is no path, or a schedule that cannot be written.
        OSError
            If it cannot be written; an existing file is unchanged then.
        """
        from mpishard.checkpoint import replace_file

        check_path("path", path)
        replace_file(Path(path), [self.serialize()])

    def load_model(self, path: PathLike) -> None:
        """Take settings, own state and step count from a file of `save_model`.

        Raises
        ------
        TypeError, ValueError
            For an argument that is no path, or another file; nothing has changed then.
        FileNotFoundError
            If there is no file.
        """
        check_path("path", path)
        self.deserialize(Path(path).read_bytes())

    save_state = ICheckpointableModel.save_state
    load_state = ICheckpointableModel.load_state
