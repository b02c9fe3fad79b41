"""Owners of elements: parameter table, units, pieces, configuration.

Begin with ``table.py``: the place of each parameter in the flat vector, the runs of layers that are
gathered as one (units), and each rank's pieces of them.

``regions.py`` computes with boxes of tensors. ``placement.py`` relates the flat vector of a rank
of a mesh to the model's. ``configuration.py`` holds the user's choices, and ``numerics.py``
records what decides the bits of a result. This room imports layout, contracts and communication.
"""

from mpishard.sharding.configuration import ShardingConfiguration, by_node, shared_choices
from mpishard.sharding.numerics import numerics_differences, numerics_fingerprint
from mpishard.sharding.placement import LocalParameter, Placement, by_parameter, range_to_write
from mpishard.sharding.refusals import (
    refuse_for_model,
    refuse_line_search,
    refuse_one_replica,
    refuse_rounding,
    refuse_several_replicas,
    refuse_updates_alone,
    refuse_with_leaves,
)
from mpishard.sharding.regions import (
    FLAT,
    Box,
    Region,
    box_shape,
    box_within,
    boxes_of,
    join_dims,
    put_region,
    shared_box,
    take_region,
    whole_box,
)
from mpishard.sharding.table import (
    ParameterEntry,
    ParameterTable,
    Piece,
    Unit,
    build_units,
    common_pieces,
    cut_into_common_pieces,
    first_names,
    nested,
    nested_views,
    overlapping,
    owned_pieces,
    pieces_within,
    reproducing_worlds,
    unit_at,
)

__all__ = [
    "FLAT",
    "Box",
    "LocalParameter",
    "ParameterEntry",
    "ParameterTable",
    "Piece",
    "Placement",
    "Region",
    "ShardingConfiguration",
    "Unit",
    "build_units",
    "by_parameter",
    "common_pieces",
    "cut_into_common_pieces",
    "first_names",
    "nested_views",
    "numerics_differences",
    "numerics_fingerprint",
    "overlapping",
    "owned_pieces",
    "pieces_within",
    "range_to_write",
    "reproducing_worlds",
    "unit_at",
    "whole_box",
]
