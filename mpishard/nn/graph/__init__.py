"""Computation graphs: the operations of a model as nodes that a program can walk.

Begin with ``node.py``, one operation and its inputs. ``primitives.py`` has the operations as plain
formulas; ``tracing.py`` turns layers into them. This chapter may import the layers.
"""
