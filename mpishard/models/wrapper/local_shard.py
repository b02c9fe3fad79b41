"""The parameters that a rank holds: values, ranges of the flat vector, and equality of replicas."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array, ReplicaError, array_namespace, to_host
from mpishard.communication import CommunicationBackend, all_texts, who
from mpishard.models.engine.engine import Engine
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.sharding import Piece, Placement, Region, by_parameter

_KEY_BYTES = 8
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The pieces of the parameters on this rank, end to end; all of them if they are replicated.

    In mixed precision these are the float32 parameters, which the rank updates.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """

    engine: Engine

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        engine = self.engine
        sharded = engine.policy.shards_parameters or engine.parameters.owners_only
        return engine.layout.pieces(sharded=sharded)

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(piece.length for piece in self.pieces)

    def values(self) -> Array:
        """Return a copy of the values, shape (length,)."""
        owned = self.engine.parameters.owned(self.pieces)
        if not owned:  # a stage without parameters
            layout = self.engine.layout
            return layout.device.namespace.empty(0, layout.dtype)
        return array_namespace(owned[0]).concatenate(owned)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges ``(start, stop)`` of the flat vector; adjacent ones are joined."""
        placement = self.engine.placement
        own = [(piece.start, piece.stop) for piece in self.pieces]
        # Without a mesh a piece is one range of the model's vector already.
        if placement.is_whole:
            return tuple(own) if self.engine.policy.shards_parameters else ((0, placement.length),)
        found: list[tuple[int, int]] = []
        for start, stop in (r for bounds in own for r in placement.ranges(*bounds)):
            # Slices that follow each other are one range.
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return tuple(found)

    def properties(self) -> dict[str, object]:
        """Return the metadata that describe the sharding."""
        policy = self.engine.policy
        return {
            "ShardSize": self.length,
            "ParametersSharded": policy.shards_parameters,
            "ParametersReplicated": not policy.shards_parameters,
            "GradientsSharded": policy.shards_gradients,
            "GradientsReplicated": not policy.shards_gradients,
            "OptimizerStateSharded": policy.shards_state,
        }


def compare_replicas(
    parameters: ParameterStore,
    placement: Placement,
    world: CommunicationBackend,
    step: int,
    *,
    is_on_mesh: bool = False,
) -> int:
    """Compare every copy of every parameter that ranks hold for good. Collective.

    Each rank takes a CRC-32 of the bits of each range of a parameter that it holds, and one
    all-gather of 24 bytes a range compares them. The pieces of sharded parameters have no replica,
    because only one rank holds each. Parameters that the ranks of a node share have none there.

    Parameters
    ----------
    parameters : ParameterStore
        The store of the ranks that divide the parameters.
    placement : Placement
        Names of the ranges.
    world : CommunicationBackend
        All ranks.
    step : int
        Number of updates, for the message.
    is_on_mesh : bool
        Whether ranks outside the store's have copies, too: on a mesh, and of replicas.

    Returns
    -------
    int
        Number of ranges of which there are several copies.

    Raises
    ------
    ReplicaError
        On every rank, naming the ranks and the parameters that differ.
    """
    is_shared_by_all = parameters.once_per_node and parameters.backend.node_count == 1
    if is_shared_by_all and not is_on_mesh:
        return 0
    pieces = parameters.local_pieces
    if parameters.once_per_node:  # the first rank of a node reports_loss for it
        is_leader = parameters.backend.local_rank == 0
        pieces = parameters.layout.pieces(sharded=False) if is_leader else ()
    values = zip(pieces, parameters.owned(pieces), strict=True)
    # Ranks hold different regions. A hash of 8 bytes names each, so that all rows have one length.
    own: dict[int, tuple[Region, int]] = {}
    cut = placement.cut((piece.start, array) for piece, array in values)
    for region, array in by_parameter(cut, placement.entries):
        bits = np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8)
        own[_key(region)] = region, zlib.crc32(bits.data)
    rows = np.array([(world.rank, key, crc) for key, (_, crc) in own.items()], np.int64)
    # Rows of numbers and no names: a name travels only if its parameter differs.
    everyone = world.all_gather(rows.reshape(-1, 3), subject=parameters.layout.subject)
    copies: dict[int, dict[int, int]] = {}
    for rank, key, crc in everyone.tolist():
        copies.setdefault(key, {})[rank] = crc
    # A region that one rank alone holds has nothing to be compared with.
    several = {key: found for key, found in copies.items() if len(found) > 1}
    differing = {key: found for key, found in several.items() if len(set(found.values())) > 1}
    if differing:
        names = {key: region.name for key, (region, _) in own.items()}
        _refuse(differing, names, world, f"after step {step} replicas differ", parameters)
    return len(several)


def _key(region: Region) -> int:
    text = json.dumps([region.name, region.box, region.start, region.stop])
    digest = hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)


def _refuse(
    differing: Mapping[int, Mapping[int, int]],
    own: Mapping[int, str],
    world: CommunicationBackend,
    what: str,
    parameters: ParameterStore,
) -> None:
    """Raise `ReplicaError`; the first rank that holds a region sends its name. Collective."""
    # One rank names each region, so that an error of many parameters stays short to send.
    mine = {key: own[key] for key, found in differing.items() if min(found) == world.rank}
    names: dict[str, str] = {}
    for text in all_texts(world, json.dumps(mine) if mine else ""):
        names |= json.loads(text)
    lines = [_line(names[str(key)], found) for key, found in differing.items()]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"and {len(lines) - _MOST_SHOWN} more"]
    shared = ". Ranks of a node share one copy, which is that of the first of them"
    raise ReplicaError(
        f"{what}: {'; '.join(lines)}"
        f"{shared if parameters.once_per_node else ''}. The cause is faulty memory, a change made "
        "on some ranks only, or a black box whose results depend on its rank. Resume from an "
        "earlier checkpoint; if it happens again, do not use the machine of that rank"
    )


def _line(name: str, found: Mapping[int, int]) -> str:
    ((common, _),) = Counter(found.values()).most_common(1)
    # The majority is assumed to be right: most likely a single rank is at fault.
    odd = [rank for rank, crc in found.items() if crc != common]
    rest = [rank for rank, crc in found.items() if crc == common]
    return f"parameter {name!r} of {who(odd)} differs from that of {who(rest)}"
