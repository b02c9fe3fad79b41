"""The engine: the one way in which parameters change."""
