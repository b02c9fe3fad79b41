"""Which layers of a model share a weight, and whether they can be split alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpishard.nn.composites import Residual, Sequential
from mpishard.nn.embedding import Embedding
from mpishard.nn.layer import Layer
from mpishard.nn.linear import Linear

__all__ = ["Ties", "is_open", "walk_layers"]


def is_open(layer: Layer) -> bool:
    """Whether the rules know what the composite computes, and go into it."""
    return type(layer) in (Residual, Sequential)


def walk_layers(layers: Mapping[str, Layer], prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted name, layer) of all that the rules do not go into, in order."""
    for name, layer in layers.items():
        if is_open(layer):
            yield from walk_layers(layer.children, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


class Ties:
    """The ties of a model, of which a pipeline stage may hold one end alone.

    Parameters
    ----------
    model_layers : mapping of str to Layer
        All top-level layers of the model.
    """

    def __init__(self, model_layers: Mapping[str, Layer]) -> None:
        self._owners: dict[str, tuple[str, Layer]] = {}
        self._users: dict[str, list[tuple[str, Layer]]] = {}
        for path, layer in walk_layers(model_layers):
            for name, spec in layer.walk_parameters(f"{path}."):
                self._owners[name] = path, layer
                if spec.tied_to is not None:
                    self._users.setdefault(spec.tied_to, []).append((path, layer))

    def obstacle(self, path: str, layer: Layer) -> str | None:
        """Why the layer called ``path`` must stay whole, where a tie is the reason.

        An embedding and the linear layers that read logits from its table are split by rows of
        the table, all alike. Whatever else shares a weight needs all of it.

        Raises
        ------
        ValueError
            Where the layer is tied to a parameter that none of the model's layers has.
        """
        for name, spec in layer.parameters.items():
            target = spec.tied_to or f"{path}.{name}"
            if target not in self._users and spec.tied_to is None:
                continue
            if target not in self._owners:
                raise ValueError(
                    f"{path}.{name} is tied to {target}, which none of the layers given has: pass "
                    "model_layers, all layers of the model, where a part of it is partitioned"
                )
            owner = self._owners[target]
            for other, sharer in [owner, *self._users[target]]:
                expected = Embedding if other == owner[0] else Linear
                if type(sharer) is not expected:
                    return (
                        f"it shares {target} with {other}, a {type(sharer).__name__}, and only an "
                        "Embedding and Linear layers tied to it are split alike"
                    )
        return None

    def is_shared(self, path: str, layer: Layer) -> bool:
        """Whether another layer has a parameter of this one, or this one another's."""
        return any(
            spec.tied_to is not None or f"{path}.{name}" in self._users
            for name, spec in layer.parameters.items()
        )
