"""Owners of elements: parameter table, units, pieces, configuration."""

from mpishard.sharding.analyzer import ParameterAnalyzer, ParameterGroup
from mpishard.sharding.configuration import ShardingConfiguration
from mpishard.sharding.numerics import numerics_differences, numerics_fingerprint
from mpishard.sharding.placement import Placement, Slice, written_part
from mpishard.sharding.regions import Box, Region, whole_box
from mpishard.sharding.table import ParameterEntry, ParameterTable, nested_views
from mpishard.sharding.units import (
    Piece,
    Unit,
    build_units,
    cells_of,
    cut_at_cells,
    owned_pieces,
    pieces_within,
)

__all__ = [
    "Box",
    "ParameterAnalyzer",
    "ParameterEntry",
    "ParameterGroup",
    "ParameterTable",
    "Piece",
    "Placement",
    "Region",
    "ShardingConfiguration",
    "Slice",
    "Unit",
    "build_units",
    "cells_of",
    "cut_at_cells",
    "nested_views",
    "numerics_differences",
    "numerics_fingerprint",
    "owned_pieces",
    "pieces_within",
    "whole_box",
    "written_part",
]
