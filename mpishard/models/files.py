"""Files and bytes for a model whose parameters lie on several ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import safetensors.numpy

from mpishard import checkpoint
from mpishard.arrays import Array, to_host
from mpishard.checkpoint.plain import named_arrays, named_arrays_of, packed_vector
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ICheckpointableModel, IParameterizable, PathLike
from mpishard.models.engine import Engine
from mpishard.sharding import ParameterEntry

__all__ = ["ShardedModelFiles"]


class ShardedModelFiles(ICheckpointableModel, IParameterizable):
    """Serialisation of what an engine holds: layout-free, and collective throughout."""

    strategy: ClassVar[str]

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
        """How the ranks talk."""
        return self.engine.backend

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the flat vector."""
        return self.engine.holdings.dtype

    def serialize(self) -> bytes:
        """The named parameters in safetensors format, the same bytes on every rank. Collective."""
        self.engine.replicas.require_equal("serialize()")
        full = to_host(self.engine.gather())
        return safetensors.numpy.save(named_arrays(self.checkpoint_parameters(), full))

    def deserialize(self, data: bytes) -> None:
        """Take parameters from what `serialize` gave at any world size. Collective."""
        arrays = named_arrays_of(data)
        self.set_parameters(packed_vector(arrays, self.checkpoint_parameters(), self.dtype))

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

    def arrays_to_write(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        """The rank's own pieces; of replicas each rank writes one part."""
        self.engine.replicas.require_equal("a checkpoint")
        pieces = self.engine.holdings.pieces()
        owned = self.engine.parameters.owned(pieces)
        return {"parameters": [(p.start, a) for p, a in zip(pieces, owned, strict=True)]}

    def arrays_to_read(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        """All that this rank holds."""
        self.engine.require_no_round("a checkpoint cannot be loaded")
        store = self.engine.parameters
        owned = store.owned(store.held)
        return {"parameters": [(p.start, a) for p, a in zip(store.held, owned, strict=True)]}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Where the checkpoint came from, for those who read it."""
        return {
            "strategy": self.strategy,
            "world_size": self.backend.world_size,
            "steps": self.engine.step_number,
        }

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Hear that the parameters have been read."""
        # What is random goes on with the step; a plain model's checkpoint knows of none.
        self.engine.step_number = int(metadata.get("steps", self.engine.step_number))
        self.engine.read()
