"""An optimizer's state as bytes that fit every world size and strategy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.checkpoint.format.content import COUNT, OBJECT, require_form
from mpishard.checkpoint.format.tensor_file import bytes_of, tensors_and_document
from mpishard.checkpoint.loading.reader import CheckpointReader
from mpishard.checkpoint.saving.save import write_checkpoint
from mpishard.communication import CommunicationBackend
from mpishard.contracts import PathLike
from mpishard.errors import CheckpointError
from mpishard.models import ShardedModelBase
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.sharding import ParameterEntry, Piece, Placement, Region
from mpishard.sharding.regions import put_region, take_region

_HEADER = "mpishard.optimizer"

STATE_FORM: dict[str, Any] = {"optimizer_steps": COUNT, "settings": OBJECT, "numbers?": OBJECT}
"""The form of an optimizer's metadata in a checkpoint."""


@dataclass(frozen=True)
class StateBytes:
    """Settings, step count, and each state tensor under ``<state name>/<parameter name>``.

    The format is that of safetensors; settings and step count are JSON in its header.

    Parameters
    ----------
    rule : str
        Name of the rule's class.
    settings : mapping
        Its ``fingerprint()``.
    steps : int
        Updates made.
    tensors : mapping of str to array
        NumPy arrays in the parameters' shapes; frozen parameters have none.
    numbers : mapping
        The rule's numbers besides them, as JSON.
    """

    rule: str
    settings: Mapping[str, Any]
    steps: int
    tensors: Mapping[str, np.ndarray[Any, Any]]
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fresh(cls, rule: Optimizer) -> StateBytes:
        """Return the state before the first step: settings alone."""
        return cls(type(rule).__name__, rule.fingerprint(), 0, {})

    def to_bytes(self) -> bytes:
        """Return the bytes, the same for the same content."""
        header = {"rule": self.rule, "settings": dict(self.settings), "steps": self.steps}
        if self.numbers:
            header["numbers"] = dict(self.numbers)
        # A single key, because safetensors writes several in no fixed order.
        return bytes_of(self.tensors, {_HEADER: json.dumps(header, sort_keys=True)})

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
        tensors, header = tensors_and_document(data, _HEADER, "an optimizer's ")
        numbers = header.get("numbers", {})
        return cls(header["rule"], header["settings"], int(header["steps"]), tensors, numbers)

    @classmethod
    def from_checkpoint(cls, path: PathLike, rule: Optimizer) -> StateBytes:
        """Return all of the state that a checkpoint holds of ``rule``.

        Raises
        ------
        FileNotFoundError
            If there is no checkpoint.
        CheckpointError
            If it is torn, or of another rule.
        """
        name = type(rule).__name__
        with CheckpointReader(path) as reader:
            try:
                found: Any = reader.metadata.get("optimizer")
                require_form(found, STATE_FORM, "metadata.optimizer")
                tensors = {
                    f"{kind.rpartition('/')[2]}/{entry.name}": reader.read_whole(kind, entry)
                    for kind in reader.kinds
                    if kind.startswith(f"optimizer/{name}/")
                    for entry in reader.held(kind)
                }
                numbers = found.get("numbers", {})
                saved = cls(name, found["settings"], found["optimizer_steps"], tensors, numbers)
                saved.require_rule(
                    found["settings"].get("rule", name), rule.needed_state(),
                    "; a wrapper such as LocalSGDOptimizer saves more than its rule's state: to "
                    "load that, call bind(model) first",
                )  # fmt: skip
            except ValueError as error:
                raise CheckpointError(f"the checkpoint {reader.path}: {error}") from error
        return saved

    def to_checkpoint(self, path: PathLike, backend: CommunicationBackend) -> None:
        """Write a state without tensors as a checkpoint of its own. Collective."""
        own = {"settings": self.settings, "optimizer_steps": self.steps}
        document = {"model": None, "optimizer": own, "user": {}}
        # A manifest names a dtype even without parameters: any dtype will do.
        write_checkpoint(path, backend, (), np.dtype(np.float64), {}, document)

    @property
    def is_fresh(self) -> bool:
        """True before the first step of an optimizer, which has no model and so no tensors."""
        return self.steps == 0 and not self.tensors

    def require_rule(self, rule: str, state_names: Sequence[str], advice: str = "") -> None:
        """Refuse another rule's state; ``advice`` follows if the rule is the same.

        Raises
        ------
        ValueError
            Naming both rules, or the state vectors that differ.
        """
        held = sorted({name.partition("/")[0] for name in self.tensors})
        if self.rule != rule or not (self.is_fresh or held == sorted(state_names)):
            raise ValueError(
                f"these bytes hold the state {held} of {self.rule}, and {rule} needs "
                f"{sorted(state_names)}" + advice * (self.rule == rule)
            )

    def require_fit(
        self, model: ShardedModelBase, frozen: frozenset[str], state_names: Sequence[str]
    ) -> None:
        """Refuse the state of another model.

        Raises
        ------
        ValueError
            Naming the first tensor that is missing, unknown, or of another shape or dtype.
        """
        if self.is_fresh:
            return
        expected = {
            f"{name}/{entry.name}": (entry.shape, model.dtype.name)
            for name in state_names
            for entry in model.parameter_entries
            if entry.name not in frozen
        }
        given = {name: (array.shape, array.dtype.name) for name, array in self.tensors.items()}
        wrong = [n for n in sorted(expected | given) if expected.get(n) != given.get(n)]
        if wrong:
            raise ValueError(
                f"{len(wrong)} state tensors do not fit the model, first {wrong[0]!r}: expected "
                f"{expected.get(wrong[0], 'none')}, got {given.get(wrong[0], 'none')}"
            )

    def fill(
        self, state: Mapping[str, Array], pieces: Sequence[Piece], placement: Placement
    ) -> None:
        """Fill state vectors, as long as ``pieces`` end to end, from the tensors.

        ``placement`` finds the tensors that the pieces are parts of.
        """
        for name, vector in state.items():
            if self.is_fresh:  # there are no tensors: the state begins anew
                vector[...] = 0
                continue
            for region, values in placement.cut((p.start, vector[p.in_shard]) for p in pieces):
                take_region(self.tensors[f"{name}/{region.name}"], region, values)


def gather_state(
    backend: CommunicationBackend,
    state: Mapping[str, Array],
    pieces: Sequence[Piece],
    placement: Placement,
    entries: Sequence[ParameterEntry],
) -> dict[str, np.ndarray[Any, Any]]:
    """Return all ranks' state in the parameters' shapes, on every rank. Collective.

    Parameters
    ----------
    backend : CommunicationBackend
        All ranks that hold a part of the model.
    state : mapping of str to Array
        This rank's vectors; the same names on every rank.
    pieces : sequence of Piece
        The pieces that this rank contributes. Together the ranks contribute every element of
        ``entries`` once.
    placement : Placement
        The part of the model that the pieces belong to.
    entries : sequence of ParameterEntry
        The model's parameters that have state.
    """
    mine = [region for p in pieces for region, _ in placement.regions(p.start, p.stop)]
    # On a mesh a rank holds boxes of tensors: all ranks need the order of the gathered elements.
    # All numbers in one array: the parameter's number of dims is the length of a region's box.
    known = placement.entries
    numbers = {entry.name: number for number, entry in enumerate(known)}
    rows = [[numbers[region.name], region.start, region.stop, *itertools.chain(*region.box)]
            for region in mine]  # fmt: skip
    rest = iter(backend.all_gather(np.array([*itertools.chain(*rows)], np.int64)).tolist())
    regions = []
    for number in rest:
        start, stop = next(rest), next(rest)
        box = tuple((next(rest), next(rest)) for _ in known[number].shape)
        regions.append(Region(known[number].name, box, start, stop))
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, vector in state.items():
        host = to_host(vector)
        own = [host[p.in_shard] for p in pieces]
        # A rank without pieces sends an empty array, which needs the dtype too.
        together = backend.all_gather(np.concatenate([host[:0], *own]))
        full = {entry.name: np.empty(entry.shape, together.dtype) for entry in entries}
        position = 0
        for region in regions:
            put_region(together[position : position + region.length], region, full[region.name])
            position += region.length
        tensors |= {f"{name}/{parameter}": tensor for parameter, tensor in full.items()}
    return tensors
