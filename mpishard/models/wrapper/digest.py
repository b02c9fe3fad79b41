"""Checksums that ranks compare: of the vectors that they are given, and of replicas."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.checkpoint.format.consensus import all_texts
from mpishard.communication import CommunicationBackend
from mpishard.communication.contract.matching import who
from mpishard.errors import ReplicaError
from mpishard.models.engine.engine import Engine
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.sharding import Placement
from mpishard.sharding.regions import Region

__all__ = ["agreed_vector", "compare_replicas"]

_KEY_BYTES = 8
_MOST_SHOWN = 4


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
    all-gather of 24 bytes a range compares them. What only one rank holds has no replica: the
    pieces of parameters that are sharded. So has what the ranks of a node hold together.

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
        Whether ranks outside the store's have copies, too.

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
    checksums = _checksums(parameters, placement)
    # Ranks hold different regions, some of them alone: a number names a region in an array of one
    # length for all.
    own = {_key(region): (region, crc) for region, crc in checksums}
    rows = np.array([(world.rank, key, crc) for key, (_, crc) in own.items()], np.int64)
    everyone = world.all_gather(rows.reshape(-1, 3))
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


def _checksums(parameters: ParameterStore, placement: Placement) -> list[tuple[Region, int]]:
    """The ranges of parameters that this rank holds, or its node if that shares memory."""
    pieces = parameters.held
    if parameters.once_per_node:
        is_leader = parameters.backend.local_rank == 0
        pieces = parameters.layout.pieces(sharded=False) if is_leader else ()
    held = zip(pieces, parameters.owned(pieces), strict=True)
    regions = placement.cut((piece.start, array) for piece, array in held)
    found = []
    for region, array in regions:
        bits = np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8)
        found.append((region, zlib.crc32(bits.data)))
    return found


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
    """Raise with the names that the first rank of each knows. Collective."""
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
        f"{shared if parameters.once_per_node else ''}. Memory that fails, or a change "
        "made on some ranks alone, parts replicas for good: go on from a checkpoint that was saved "
        "before, without the machine of that rank where it happens again"
    )


def _line(name: str, found: Mapping[int, int]) -> str:
    ((common, _),) = Counter(found.values()).most_common(1)
    # The majority is taken for right: most likely one rank has gone wrong.
    odd = [rank for rank, crc in found.items() if crc != common]
    rest = [rank for rank, crc in found.items() if crc == common]
    return f"parameter {name!r} of {who(odd)} differs from that of {who(rest)}"


def agreed_vector(engine: Engine, vector: Array, name: str, rate: float = 0.0) -> Array:
    """``vector`` in host memory and the model's dtype, once all ranks have the same. Collective.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    vector : Array
        Shape (parameter_count,).
    name : str
        Name of the method that the user called.
    rate : float
        A learning rate that goes with it.

    Raises
    ------
    TypeError
        For what is no array of real numbers, before anything is communicated.
    ValueError
        For another length, before anything is communicated; on every rank for vectors, or rates,
        that differ.
    """
    length, dtype = engine.placement.length, engine.layout.dtype
    array_namespace(vector)
    if vector.shape != (length,):
        raise ValueError(f"{name}: expected a vector of shape ({length},), got {vector.shape}")
    if not np.can_cast(vector.dtype, dtype, "same_kind"):
        raise TypeError(f"{name}: expected real numbers, got a vector of {vector.dtype}")
    # Checksums are of the bytes, so that layout and dtype must be the same on all ranks first.
    vector = np.ascontiguousarray(to_host(vector), dtype=dtype)
    own = np.array([[zlib.crc32(vector), rate]])  # float64 holds both
    marks, rates = engine.world.all_gather(own).T
    if (rates != rates[0]).any():
        raise ValueError(f"{name}: the learning rates differ between ranks: {rates.tolist()}")
    if (marks != marks[0]).any():
        raise ValueError(
            f"{name}: the vectors differ between ranks (checksums {marks.astype(int).tolist()}); "
            "every rank must pass the same values"
        )
    return vector
