"""One test body for thread-ranks in plain pytest and for processes under mpiexec.

The decorator needs pytest, and imports it when it is used. The fixture ``backend``, which makes the
MPI backend of a test, belongs to the test suite; see ``tests/conftest.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpishard.base import as_count
from mpishard.communication import run_in_threads


def in_worlds(*sizes: int) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Run a test on every rank of worlds of these sizes.

    Plain ``pytest`` runs the body on thread-ranks, once for each size. Under
    ``mpiexec -n N python -m pytest --with-mpi`` each process runs it as one rank, if N is among
    the sizes. Without sizes the test gives them itself, as values of the parameter ``world_size``.
    The body takes ``backend``, and any fixtures and parameters. Thread-ranks share these, and
    processes have their own; ``shared_path`` is one folder in both cases.

    Examples
    --------
    A test of a collective::

        @in_worlds(1, 2, 3, 4)
        def test_everyone_gets_the_sum(backend):
            assert backend.all_reduce(np.ones(1))[0] == backend.world_size
    """
    import pytest

    for size in sizes:
        as_count("a world size", size)

    def decorate(body: Callable[..., object]) -> Callable[..., object]:
        # pytest reads the signature to find fixtures, so the test must have the body's parameters.
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = inspect.signature(body).parameters
        wanted = [p.replace(kind=keyword) for n, p in parameters.items() if n != "backend"]
        added = [
            inspect.Parameter(name, keyword)
            for name in ("request", "world_size")
            if name not in parameters
        ]

        @functools.wraps(body)
        def test(*, request: Any, world_size: int, **arguments: object) -> None:
            asked = {"request": request, "world_size": world_size}
            arguments.update({name: asked[name] for name in asked.keys() & parameters.keys()})
            if request.config.getoption("with_mpi", default=False):
                body(backend=request.getfixturevalue("backend"), **arguments)
            else:
                run_in_threads(world_size, lambda backend: body(backend=backend, **arguments))

        test.__signature__ = inspect.Signature([*wanted, *added])  # type: ignore[attr-defined]
        if sizes:
            test = pytest.mark.parametrize("world_size", sizes)(test)
        return pytest.mark.in_worlds(test)  # type: ignore[no-any-return]

    return decorate
