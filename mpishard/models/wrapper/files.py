"""Files and bytes for a model whose parameters lie on several ranks."""

from __future__ import annotations

import json
import logging
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mpishard import checkpoint
from mpishard.arrays import to_host
from mpishard.checkpoint.exchange.plain import (
    PlainModelFiles,
    choices_in,
    choices_of,
    metadata_with,
    named_bytes,
    packed_vector,
)
from mpishard.checkpoint.format.metadata import COUNT, require_form
from mpishard.checkpoint.format.tensor_bytes import tensors_of
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ICheckpointableModel, IParameterizable, PathLike
from mpishard.models.engine.engine import Engine
from mpishard.models.programs.leaves import NUMERICS
from mpishard.sharding import ParameterEntry, Piece, numerics_differences

__all__ = ["ShardedModelFiles"]

_log = logging.getLogger("mpishard")


class ShardedModelFiles(ICheckpointableModel, IParameterizable):
    """Serialisation of what an engine holds: layout-free, and collective throughout."""

    strategy: ClassVar[str]

    @property
    @abstractmethod
    def wrapped_model(self) -> Any:
        """The plain model, which holds what is chosen beside parameters."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The one way in which the parameters change."""

    @property
    @abstractmethod
    def parameter_entries(self) -> tuple[ParameterEntry, ...]:
        """Name, shape and start of each parameter."""

    @property
    def backend(self) -> CommunicationBackend:
        """How all ranks talk."""
        return self.engine.world

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the flat vector."""
        return self.engine.layout.dtype

    def serialize(self) -> bytes:
        """The named parameters in safetensors format, the same bytes on every rank. Collective.

        With them goes what is chosen of the plain model, such as its active features.
        """
        self.engine.replicas.require_equal("serialize()")
        full = to_host(self.engine.gather())
        return named_bytes(self.checkpoint_parameters(), full, self._choices())

    def deserialize(self, data: bytes) -> None:
        """Take what `serialize` gave at any world size, or the plain model's. Collective.

        Raises
        ------
        TypeError, ValueError
            For what is something else, or of another model, before anything is communicated;
            on every rank where the ranks were given different bytes. Nothing has changed then.
        """
        arrays, choices = tensors_of(data), choices_of(data)
        vector = packed_vector(arrays, self.checkpoint_parameters(), self.dtype)
        self._check_choices(choices)
        text = json.dumps(choices, sort_keys=True).encode()
        marks = self.backend.all_gather(np.array([zlib.crc32(text)]))
        if (marks != marks[0]).any():
            raise ValueError(
                "deserialize: what is chosen of the model differs between the ranks' bytes "
                f"(checksums {marks.tolist()}); every rank must pass the same"
            )
        self.set_parameters(vector)
        self._take_choices(choices)

    def save_model(self, path: PathLike) -> None:
        """Write the parameters to a checkpoint directory. Collective.

        Raises
        ------
        TypeError, ValueError
            For what is no path, or a blank one, before anything is communicated.
        ShardingError
            Where replicas have drifted apart.
        OSError
            Where it cannot be written, a PermissionError where that is why, on every rank; what
            was there is as it was.
        """
        self.engine.replicas.require_equal("save_model()")
        checkpoint.save(path, self)

    def load_model(self, path: PathLike) -> None:
        """Take parameters from a checkpoint of any world size and strategy. Collective.

        Raises
        ------
        TypeError, ValueError
            For what is no path, or a blank one, before anything is communicated.
        FileNotFoundError
            Where nothing is there.
        CheckpointError
            Where it is torn or of another model; nothing has changed then.
        """
        checkpoint.load(path, self)

    @property
    def checkpoint_backend(self) -> CommunicationBackend:
        """Every rank writes its part."""
        return self.backend

    @property
    def checkpoint_dtype(self) -> np.dtype[Any]:
        """The dtype of what is written."""
        return self.dtype

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        """Name, shape and start of each parameter, and whether it is trained now."""
        frozen = self.engine.program.frozen
        return [replace(e, trainable=e.name not in frozen) for e in self.parameter_entries]

    def arrays_to_write(self) -> checkpoint.Pieces:
        """The rank's own pieces; of replicas each rank writes one part."""
        self.engine.replicas.require_equal("a checkpoint")
        return self._regions(self.engine.layout.pieces(), written=True)

    def arrays_to_read(self) -> checkpoint.Pieces:
        """All that this rank holds."""
        self.engine.round.require_none("a checkpoint cannot be loaded")
        return self._regions(self.engine.parameters.held)

    def _regions(self, pieces: Sequence[Piece], *, written: bool = False) -> checkpoint.Pieces:
        owned = self.engine.parameters.owned(pieces)
        parts = [(p.start, values) for p, values in zip(pieces, owned, strict=True)]
        return {"parameters": self.engine.placement.cut(parts, written=written)}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Where the checkpoint came from, for those who read it."""
        origin = {
            "strategy": self.strategy,
            "world_size": self.backend.world_size,
            "steps": self.engine.step_number,
        }
        leaves = self.engine.leaves
        if leaves is not None:
            origin[NUMERICS] = leaves.numerics()
        return origin | metadata_with(self._choices())

    def check_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Refuse what the plain model could not take."""
        require_form(metadata, {"steps?": COUNT}, "metadata.model")
        self._check_choices(choices_in(metadata))

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Hear that the parameters have been read, and take what was chosen beside them."""
        # What is random goes on with the step; a plain model's checkpoint knows of none.
        self.engine.step_number = int(metadata.get("steps", self.engine.step_number))
        self._take_choices(choices_in(metadata))
        self.engine.read()
        self._compare_numerics(metadata.get(NUMERICS))

    def _compare_numerics(self, before: Any) -> None:
        """Say why a run that went by leaves will not go on with the same bits here."""
        leaves = self.engine.leaves
        if not isinstance(before, Mapping) or self.backend.rank != 0:
            return
        if leaves is None:
            changed = [f"gradient_leaves was {before.get('gradient_leaves')} and is None"]
        else:
            changed = numerics_differences(before, leaves.numerics())
        if changed:
            _log.warning(
                "the checkpoint is of a run whose bits no number of ranks changes "
                "(gradient_leaves); from here they are others than those of a run that was never "
                "interrupted: %s", "; ".join(changed),
            )  # fmt: skip

    def _choices(self) -> dict[str, Any]:
        model = self.wrapped_model
        return model.choices() if isinstance(model, PlainModelFiles) else {}

    def _check_choices(self, choices: Mapping[str, Any]) -> None:
        model = self.wrapped_model
        if isinstance(model, PlainModelFiles):
            model.check_choices(choices)
        elif choices:
            raise ValueError(
                f"what was saved goes with {sorted(choices)}, which a {type(model).__name__} "
                "cannot be told: load it into a model of the class that saved it"
            )

    def _take_choices(self, choices: Mapping[str, Any]) -> None:
        if isinstance(self.wrapped_model, PlainModelFiles):
            self.wrapped_model.take_choices(choices)
