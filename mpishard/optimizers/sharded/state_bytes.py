"""An optimizer's state as a checkpoint has it, but whole and in memory, or as bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.base import Array, CheckpointError, DType, Metadata, to_host
from mpishard.checkpoint import (
    COUNT,
    OBJECT,
    CheckpointReader,
    Pieces,
    bytes_of,
    require_form,
    tensors_and_document,
    write_checkpoint,
)
from mpishard.communication import CommunicationBackend
from mpishard.contracts import PathLike
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.sharding import ParameterEntry, Region, by_parameter, put_region, take_region

_HEADER = "mpishard.optimizer"

STATE_FORM: dict[str, object] = {"optimizer_steps": COUNT, "settings": OBJECT, "numbers?": OBJECT}
"""The form of an optimizer's metadata in a checkpoint."""

Tensors = dict[str, Array]


def kinds_of(rule: Optimizer) -> set[str]:
    """Return the kinds of a rule's own state."""
    return {f"optimizer/{type(rule).__name__}/{name}" for name in rule.needed_state()}


@dataclass(frozen=True)
class StateBytes:
    """What a checkpoint has of an optimizer: arrays by kind and parameter, and metadata.

    The bytes are in safetensors format, with the names ``<kind>/<parameter>``. The metadata are
    JSON in its header.

    Parameters
    ----------
    metadata : mapping
        `CheckpointState.checkpoint_metadata` of the state.
    arrays : mapping of str to mapping
        Kind -> parameter -> NumPy array in the parameter's shape. Frozen parameters have none.
    """

    metadata: Metadata
    arrays: Mapping[str, Tensors] = field(default_factory=dict)

    @classmethod
    def fresh(cls, rule: Optimizer) -> StateBytes:
        """Return the state before the first step: settings alone."""
        return cls({"settings": rule.fingerprint(), "optimizer_steps": 0})

    @classmethod
    def gather(
        cls,
        backend: CommunicationBackend,
        pieces: Pieces,
        metadata: Metadata,
        entries: Sequence[ParameterEntry],
        dtype: DType,
        subject: int = 0,
    ) -> StateBytes:
        """Return all ranks' pieces as whole arrays, on every rank. Collective.

        Parameters
        ----------
        backend : CommunicationBackend
            All ranks that hold a part of the model.
        pieces : mapping of str to sequence of (Region, Array)
            `CheckpointState.arrays_to_write` of this rank; the same kinds on every rank.
        metadata : mapping
            Equal on all ranks.
        entries : sequence of ParameterEntry
            The model's parameters that have state.
        dtype : dtype
            Dtype of the state.
        subject : int
            The model's number in collectives.
        """
        # On a mesh a rank holds boxes of tensors: all ranks need the order of the gathered
        # elements. All numbers in one array: the parameter's number of dims is the length of a
        # region's box.
        numbers = {entry.name: number for number, entry in enumerate(entries)}
        rows = [
            [kind, numbers[region.name], region.start, region.stop, *itertools.chain(*region.box)]
            for kind, given in enumerate(pieces.values())
            for region, _ in by_parameter(given, entries)
        ]
        mine = np.array([*itertools.chain(*rows)], np.int64)
        rest = iter(backend.all_gather(mine, subject=subject).tolist())
        regions: list[list[Region]] = [[] for _ in pieces]
        for kind in rest:
            entry, start, stop = entries[next(rest)], next(rest), next(rest)
            box = tuple((next(rest), next(rest)) for _ in entry.shape)
            regions[kind].append(Region(entry.name, box, start, stop))
        arrays = {}
        for (name, given), order in zip(pieces.items(), regions, strict=True):
            # A rank without pieces sends an empty array, which needs the dtype too.
            own = [np.empty(0, dtype), *(to_host(values) for _, values in given)]
            values = backend.all_gather(np.concatenate(own), subject=subject)
            full = arrays[name] = {entry.name: np.empty(entry.shape, dtype) for entry in entries}
            position = 0
            for region in order:
                put_region(values[position : position + region.length], region, full[region.name])
                position += region.length
        return cls(metadata, arrays)

    def to_bytes(self) -> bytes:
        """Return the bytes, the same for the same content."""
        # A single key, because safetensors writes several in no fixed order.
        return bytes_of(self._tensors, {_HEADER: json.dumps(self.metadata, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes) -> StateBytes:
        """Return the state in bytes from `to_bytes`.

        Raises
        ------
        TypeError
            For an argument that is not bytes.
        ValueError
            For other or torn bytes.
        """
        tensors, metadata = tensors_and_document(data, _HEADER)
        require_form(metadata, STATE_FORM, "the metadata of these bytes")
        arrays: dict[str, Tensors] = {}
        for key, tensor in tensors.items():
            # A kind is "optimizer/<rule>/<name>", and a parameter's name may have slashes.
            *kind, name = key.split("/", 3)
            arrays.setdefault("/".join(kind), {})[name] = tensor
        return cls(metadata, arrays)

    @classmethod
    def from_checkpoint(cls, path: PathLike, rule: Optimizer) -> StateBytes:
        """Return the state of ``rule`` in a checkpoint.

        Raises
        ------
        FileNotFoundError
            If there is no checkpoint.
        CheckpointError
            If it is torn, or of another rule.
        """
        with CheckpointReader(path) as reader:
            try:
                found: Any = reader.metadata.get("optimizer")
                require_form(found, STATE_FORM, "metadata.optimizer")
                kinds = [kind for kind in reader.kinds if kind.startswith("optimizer/")]
                # Before the arrays are read, because they may be large.
                cls(found, {kind: {} for kind in kinds}).require_rule(rule, alone=True)
                return cls(
                    found,
                    {
                        kind: {
                            entry.name: reader.read_whole(kind, entry)
                            for entry in reader.parameters_of(kind)
                        }
                        for kind in kinds
                    },
                )
            except ValueError as error:
                raise CheckpointError(f"the checkpoint {reader.path}: {error}") from error

    def to_checkpoint(self, path: PathLike, backend: CommunicationBackend) -> None:
        """Write a state without arrays as a checkpoint of its own. Collective."""
        document = {"model": None, "optimizer": self.metadata, "user": {}}
        # A manifest names a dtype even without parameters: any dtype will do.
        write_checkpoint(path, backend, (), np.dtype(np.float64), {}, document)

    @property
    def _tensors(self) -> Tensors:
        """The arrays by their names in the bytes."""
        return {
            f"{kind}/{name}": tensor
            for kind, given in self.arrays.items()
            for name, tensor in given.items()
        }

    @property
    def is_fresh(self) -> bool:
        """True before the first step of an optimizer, which has no model and so no arrays."""
        return self.metadata["optimizer_steps"] == 0 and not self.arrays

    def is_of(self, rule: Optimizer) -> bool:
        """Return whether this is a rule's own state, without more of a wrapper's."""
        return self.is_fresh or self.arrays.keys() == kinds_of(rule)

    def require_rule(self, rule: Optimizer, *, alone: bool) -> None:
        """Refuse another rule's state; with ``alone`` also one with more than the rule's.

        Raises
        ------
        ValueError
            Naming both rules, or the state vectors that differ.
        """
        saved, mine = self.metadata["settings"].get("rule"), type(rule).__name__
        if saved != mine or (alone and not self.is_of(rule)):
            found = sorted(kind.rpartition("/")[2] for kind in self.arrays)
            raise ValueError(
                f"these bytes hold the state {found} of {saved}, and {mine} needs "
                f"{sorted(rule.needed_state())}"
                + "; a wrapper such as LocalSGDOptimizer saves more than its rule's state: to load "
                "that, call bind(model) first" * (saved == mine)
            )

    def require_fit(self, entries: Sequence[ParameterEntry], dtype: DType) -> None:
        """Refuse the state of a model with other trained parameters than ``entries``.

        Raises
        ------
        ValueError
            Naming the first array that is missing, unknown, or of another shape or dtype.
        """
        expected = {
            f"{kind}/{entry.name}": (entry.shape, dtype.name)
            for kind in self.arrays
            for entry in entries
        }
        given = {name: (array.shape, array.dtype.name) for name, array in self._tensors.items()}
        # Sorted, so that all ranks name the same array.
        wrong = [n for n in sorted(expected | given) if expected.get(n) != given.get(n)]
        if wrong:
            raise ValueError(
                f"{len(wrong)} state tensors do not fit the model, first {wrong[0]!r}: expected "
                f"{expected.get(wrong[0], 'none')}, got {given.get(wrong[0], 'none')}"
            )

    def fill(self, pieces: Pieces, entries: Sequence[ParameterEntry]) -> None:
        """Fill this rank's ``pieces``, which have kinds of these arrays, of ``entries``."""
        for kind, given in pieces.items():
            for region, values in by_parameter(given, entries):
                if self.is_fresh:  # there are no arrays: the state begins anew
                    values[...] = 0
                else:
                    take_region(self.arrays[kind][region.name], region, values)
