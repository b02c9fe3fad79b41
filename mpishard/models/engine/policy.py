"""Which of parameters, gradients and optimizer state a strategy shards."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", SC 2020, section 5: what is sharded, and what each rank holds
    whole.
    """  # noqa: D205

    shards_parameters: bool
    shards_gradients: bool
    shards_state: bool
