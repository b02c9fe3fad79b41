"""Who owns which elements: parameter table, units, pieces, configuration."""

from mpishard.sharding.analyzer import ParameterAnalyzer, ParameterGroup
from mpishard.sharding.configuration import ShardingConfiguration
from mpishard.sharding.table import ParameterEntry, ParameterTable, nested_views
from mpishard.sharding.units import Piece, Unit, build_units, owned_pieces, pieces_within

__all__ = [
    "ParameterAnalyzer",
    "ParameterEntry",
    "ParameterGroup",
    "ParameterTable",
    "Piece",
    "ShardingConfiguration",
    "Unit",
    "build_units",
    "nested_views",
    "owned_pieces",
    "pieces_within",
]
