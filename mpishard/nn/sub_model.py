"""Consecutive layers of a model, as a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishard.nn.composites import Sequential
from mpishard.nn.model import Model
from mpishard.nn.vector import VectorPart

if TYPE_CHECKING:
    from mpishard.contracts import ILossFunction

__all__ = ["SubModel"]


class SubModel(Model):
    """The layers ``layers[start:end]`` of a model, sharing its parameters.

    Its flat vector is a range of the model's, in the same memory: training either changes both.
    Names and first values are the model's. It allocates nothing, and takes ``fill_parameters``
    from the model, so that a stage of a pipeline can be dealt without the rest being made. Once a
    wrapper has taken its parameters, the model keeps the values that it had.

    It has the model's loss where it ends where the model ends, and no loss otherwise.

    Parameters
    ----------
    model : Model
        Whose layers they are.
    start, end : int
        First layer, and one past the last.

    Raises
    ------
    ValueError
        For a range that is empty or reaches outside the layers, or a layer whose parameters are
        tied to a layer outside the range.
    """

    def __init__(self, model: Model, start: int, end: int) -> None:
        if not 0 <= start < end <= model.layer_count:
            raise ValueError(
                f"layers [{start}, {end}) are empty or reach outside the {model.layer_count} "
                f"layers of the {type(model).__name__}"
            )
        infos = model.get_all_layer_info()
        own = dict(list(model.chain.children.items())[start:end])
        for name, spec in Sequential(own).walk_parameters():
            if spec.tied_to is not None and spec.tied_to.partition(".")[0] not in own:
                raise ValueError(
                    f"layers [{start}, {end}) cannot stand alone: {name} is {spec.tied_to}, of a "
                    "layer outside of them; take both layers, or untie them"
                )
        loss: ILossFunction | None = model.default_loss_function if end == len(infos) else None
        super().__init__(
            Sequential(own),
            loss,
            input_shape=infos[start].input_shape,
            seed=model.seed,
            dtype=model.dtype,
            device=model.device,
        )
        offset = infos[start].parameter_offset
        self._share(model, VectorPart(model._vector, offset, self.parameter_count))
