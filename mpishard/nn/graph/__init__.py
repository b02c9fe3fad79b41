"""Computation graphs: the operations of a model as nodes that a program can walk.

Begin with ``tracing.py``: one operation and its inputs, and how layers turn into them.
``primitives.py`` has the operations as plain formulas. This chapter may import the layers.
"""
