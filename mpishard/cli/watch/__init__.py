"""``mpishard watch``: a page of this machine that shows a run while it trains, and how it ended.

Begin with ``command.py``, which serves ``page.html`` and the state behind it. ``state.py`` reads
the state: the curves from the run's metrics, the ranks from their status pages. It may import
``run/`` and the shared modules of ``mpishard.cli``.
"""
