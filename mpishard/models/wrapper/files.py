"""Files and bytes for a model whose parameters lie on several ranks."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mpishard import checkpoint
from mpishard.base import Array, DType, Metadata, to_host
from mpishard.checkpoint import (
    COUNT,
    NUMBER,
    TEXT,
    Form,
    Kind,
    PlainModelFiles,
    choices_in,
    choices_of,
    named_bytes,
    packed_vector,
    require_form,
    tensors_of,
)
from mpishard.communication import CommunicationBackend, same_outcome
from mpishard.contracts import ILayeredModel
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.leaves import NUMERICS
from mpishard.models.engine.update import TrainingRecord
from mpishard.models.programs.placed_program import IPlaceableModel
from mpishard.models.wrapper.wrapped import require_alike
from mpishard.sharding import ParameterEntry, Piece, numerics_differences

_log = logging.getLogger("mpishard")


_FIGURE = Kind("a number, or null", lambda value: value is None or NUMBER.holds(value))
_TRAINING: dict[str, Form] = {
    each.name: NUMBER if each.default == 0 else _FIGURE for each in fields(TrainingRecord)
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files and bytes of a sharded model: layout-free, and collective throughout.

    Parameters
    ----------
    engine : Engine
        Holds the parameters.
    plain : object
        The wrapped model, which holds choices besides parameters, such as active features.
    strategy : str
        Name of the strategy, for the metadata of checkpoints.
    """

    engine: Engine
    plain: Any
    strategy: str

    @property
    def backend(self) -> CommunicationBackend:
        """All ranks, because each writes its part."""
        return self.engine.world

    @property
    def subject(self) -> int:
        """The model's number in collectives."""
        return self.engine.layout.subject

    @property
    def dtype(self) -> DType:
        """Dtype of the arrays in files."""
        return self.engine.layout.dtype

    def serialize(self) -> bytes:
        """Return the named parameters and the choices in safetensors format. Collective."""
        self.engine.replicas.require_equal("serialize()")
        full = to_host(self.engine.gather())
        return named_bytes(self.parameters(), full, self._choices())

    def unpacked(self, data: bytes) -> tuple[Array, dict[str, object]]:
        """Return the vector and the choices in bytes of `serialize`. Collective."""
        arrays, choices = tensors_of(data), choices_of(data)
        # Local checks come first: bytes that are wrong on all ranks cost no message.
        vector = packed_vector(arrays, self.parameters(), self.engine.layout.dtype)
        self._check_choices(choices)
        # Different choices would make different models from equal vectors, unnoticed by any rank.
        text = json.dumps(choices, sort_keys=True)
        require_alike(self.engine.world, "deserialize: the model's settings in the bytes", text)
        return vector, choices

    def parameters(self) -> list[ParameterEntry]:
        """Return name, shape and start of each parameter, and whether it is trained now."""
        frozen = self.engine.program.frozen
        return [
            e if e.trainable != (e.name in frozen) else replace(e, trainable=not e.trainable)
            for e in self.engine.placement.entries
        ]

    def arrays_to_write(self) -> checkpoint.Pieces:
        """Return the rank's own pieces; of replicas each rank writes one part."""
        self.engine.replicas.require_equal("a checkpoint")
        # Of replicas that are trained apart one is saved; the others' ranks write nothing, but take
        # part in the collectives.
        pieces = self.engine.layout.pieces() if self.engine.replica.is_writer else ()
        return self._regions(pieces, written=True)

    def arrays_to_read(self) -> checkpoint.Pieces:
        """Return all pieces that this rank holds."""
        self.engine.round.require_none("loading a checkpoint")
        return self._regions(self.engine.parameters.local_pieces)

    def _regions(self, pieces: Sequence[Piece], *, written: bool = False) -> checkpoint.Pieces:
        owned = self.engine.parameters.owned(pieces)
        parts = [(p.start, values) for p, values in zip(pieces, owned, strict=True)]
        return {"parameters": self.engine.placement.cut(parts, written=written)}

    def checkpoint_metadata(self) -> Metadata:
        """Return the origin of the parameters and figures of their training."""
        origin = {
            "strategy": self.strategy,
            "world_size": self.engine.world.world_size,
            "steps": self.engine.step_number,
            "training": asdict(self.engine.record),
        }
        leaves = self.engine.leaves
        if leaves is not None:
            origin[NUMERICS] = leaves.numerics()
        if self.engine.world.reductions != "exact":
            origin["reductions"] = self.engine.world.reductions
        choices = self._choices()
        if choices:
            origin["choices"] = choices
        # The object is the same on every rank: one copy in the file is enough.
        if self._is_black_box and self.engine.world.rank == 0:
            if hasattr(self.plain, "serialize") and hasattr(self.plain, "deserialize"):
                # It may hold more than a vector.
                origin["own"] = base64.b64encode(self.plain.serialize()).decode()
            elif not self.engine.has_warned_of_unsaved_attributes:
                self.engine.has_warned_of_unsaved_attributes = True
                _log.warning(
                    "checkpoints contain the parameters of %s, but none of its other attributes. "
                    "To save them too, give it serialize() -> bytes and deserialize(data)",
                    type(self.plain).__name__,
                )
        return origin

    @property
    def _is_black_box(self) -> bool:
        return not isinstance(self.plain, PlainModelFiles | ILayeredModel | IPlaceableModel)

    def check_metadata(self, metadata: Mapping[str, object]) -> None:
        """Refuse choices that the plain model could not take."""
        form = {"steps?": COUNT, "training?": _TRAINING, "own?": TEXT}
        require_form(metadata, form, "metadata.model")
        self._check_choices(choices_in(metadata))

    def restored(self, metadata: Metadata) -> None:
        """Continue from a checkpoint whose parameters have been read."""
        # Random layers depend on the step. The checkpoint of a plain model has none.
        self.engine.step_number = int(metadata.get("steps", self.engine.step_number))
        saved = metadata.get("training", {})
        self.engine.record = TrainingRecord(**{n: saved[n] for n in saved if n in _TRAINING})
        self.take_choices(choices_in(metadata))
        if "own" in metadata and self._is_black_box and hasattr(self.plain, "deserialize"):
            with same_outcome(self.engine.world):  # a user's code may fail on one rank alone
                self.plain.deserialize(base64.b64decode(metadata["own"]))
        self.engine.read()
        # A run with gradient leaves promises the same bits: warn if they may differ from here on.
        before = metadata.get(NUMERICS)
        leaves = self.engine.leaves
        if not isinstance(before, Mapping) or self.engine.world.rank != 0:
            return
        if leaves is None:
            changed = [f"gradient_leaves was {before.get('gradient_leaves')} and is None"]
        else:
            now = leaves.numerics()
            changed = numerics_differences({n: before[n] for n in before if n in now}, now)
        if changed:
            _log.warning(
                "the checkpoint was saved with gradient_leaves, so that its bits do not depend on "
                "the number of ranks; from here they may differ from those of an uninterrupted "
                "run: %s",
                "; ".join(changed),
            )

    def _choices(self) -> dict[str, object]:
        model = self.plain
        return model.choices() if isinstance(model, PlainModelFiles) else {}

    def _check_choices(self, choices: Mapping[str, object]) -> None:
        model = self.plain
        if isinstance(model, PlainModelFiles):
            model.check_choices(choices)
        elif choices:
            raise ValueError(
                f"the saved parameters belong to the choices {sorted(choices)}, which a "
                f"{type(model).__name__} does not have: load them into a model of the class that "
                "saved them"
            )

    def take_choices(self, choices: Mapping[str, object]) -> None:
        """Give the plain model the choices of a checkpoint."""
        if isinstance(self.plain, PlainModelFiles):
            self.plain.take_choices(choices)
