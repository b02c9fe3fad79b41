"""What a run will cost, before it runs."""

__all__: list[str] = []
