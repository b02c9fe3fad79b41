"""Computation graphs: the operations of a model as nodes that a program can walk.

Begin with ``tracing.py``, which has the node class and makes nodes from layers.
``primitives.py`` has the operations as plain formulas. This chapter may import the layers.
"""
