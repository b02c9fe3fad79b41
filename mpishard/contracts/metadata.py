"""What a model says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

__all__ = ["ModelMetadata"]


@dataclass
class ModelMetadata:
    """What a model says about itself.

    Parameters
    ----------
    name : str
        The model's name: its class, unless it has another.
    version : str
        Of the model, as its author counts.
    training_date : datetime
        When it was trained, with time zone; the present where not given.
    properties : dict
        Anything else, by name.
    feature_count : int
        Number of features of one sample; 0 where the model does not know.
    complexity : int
        Number of parameters.
    description : str
        One line for people.
    additional_info : dict
        What a tool may want to show beside `properties`.
    model_data : bytes
        What ``serialize`` gave, for who keeps metadata and model together; empty unless set.
    feature_importance : dict of str to float
        Importance by feature name; empty for a model that knows no features.
    model_type : str
        The kind of model: its class.
    """

    name: str
    version: str = "1"
    training_date: datetime = field(default_factory=lambda: datetime.now(UTC))
    properties: dict[str, Any] = field(default_factory=dict)
    feature_count: int = 0
    complexity: int = 0
    description: str = ""
    additional_info: dict[str, Any] = field(default_factory=dict)
    model_data: bytes = b""
    feature_importance: Mapping[str, float] = field(default_factory=dict)
    model_type: str = ""

    def set_property(self, key: str, value: Any) -> None:
        """Set one property."""
        self.properties[key] = value

    def remove_property(self, key: str) -> bool:
        """Remove one property; whether it was there."""
        was_there = key in self.properties
        self.properties.pop(key, None)
        return was_there
