"""The documented exceptions as tables: condition, exception and message of each mistake.

``(section, condition, exception, message, call)``, where ``call`` gets what a rank has in hand. A
section is that of the mirrored hierarchy: 1.1 models, 1.2 optimizers and data, 1.3 communication,
1.4 configuration, 1.5 and 1.7 sharded models, 1.6 and 1.8 sharded optimizers, 1.11 helpers; A is
what mpishard adds to it. A mistake that a rank can see alone is refused there, before anything is
communicated or changed; mistakes that only a comparison of ranks finds are refused on all of them.

Held elsewhere: a launcher of N and an MPI world of 1 (tests/communication/test_start.py,
test_launcher.py), a rank that fails, leaves or never arrives (test_failures_in_memory.py,
tests/spawned), a file system that refuses (tests/checkpoint, tests/nn/test_full_model.py), numbers
of rules, schedules and options (tests/optimizers/test_rules.py, test_schedules.py, test_plain.py),
exit codes of the command line (tests/cli).
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms
from mpishard.nn import MLP, Linear, LinearRegression, Model, Sequential
from mpishard.optimizers import Adam

X, Y = np.ones((3, 5)), np.ones((3, 2))


@pytest.fixture(scope="session")
def mistakes():
    """Return this module: objects of a rank, and the checks of a refusal."""
    return sys.modules[__name__]


class BlackBox:
    """A model with the fewest members: no loss, features, graph or predictions."""

    def __init__(self):
        self.theta = np.ones(4)

    def get_parameters(self):
        return self.theta.copy()

    def set_parameters(self, parameters):
        self.theta = parameters.copy()

    def compute_gradients(self, x, y):
        return self.theta.copy()


@dataclass
class Rank:
    """The objects of a rank that makes a mistake."""

    backend: ms.CommunicationBackend
    strategy: str
    path: Path

    def __post_init__(self):
        self.peer = 1 - self.backend.rank
        self.name = f"exceptions of rank {self.backend.rank}"
        config = ms.ShardingConfiguration(self.backend, minimum_parameter_group_size=1)
        self.config = config
        self.split_backend = self.backend.split(0)
        self.model = self.wrap(MLP([5, 3, 2], activation="tanh"))
        self.other = self.wrap(MLP([5, 3, 2]))
        self.features = self.wrap(LinearRegression(5))
        self.box = self.wrap(BlackBox())
        chain = Sequential({"linear": Linear(5, 2)})
        self.lossless = self.wrap(Model(chain, None, input_shape=(5,)))
        self.closed = self.wrap(MLP([5, 2]))
        self.closed.close()
        self.optimizer = self.wrap(Adam(1e-3))
        self.fresh = self.wrap(Adam(1e-3))
        self.optimizer.step(self.model, X, Y)

    def wrap(self, plain):
        return ms.as_distributed(plain, self.config, self.strategy)

    def data(self, **options):
        given = {"model": self.model, "x_train": X, "y_train": Y, "progress": False}
        return ms.OptimizationInputData(**(given | options))

    def optimize(self, **options):
        return self.optimizer.optimize(self.data(**options))

    @property
    def ones(self):
        return np.ones(self.model.parameter_count)


def rows_of(rows, strategy):
    """Return condition, exception, message and call of the rows of a strategy."""
    for section, condition, error, message, call, *only in rows:
        if not only or strategy in only[0]:
            yield f"{section} {condition}", error, message, call


@contextlib.contextmanager
def named(condition):
    """Name the row of the table that fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the mistake was: {condition}")
        raise


def state_of(g):
    """Return everything that a mistake could have changed."""
    return (
        g.model.local_parameter_shard.tobytes(),
        *(vector.tobytes() for vector in g.optimizer.state.values()),
        g.optimizer.steps,
        g.features.wrapped_model.get_active_feature_indices(),
        sorted(path.name for path in g.path.iterdir()),
    )


def refused(g, error, message, call):
    """Require that ``call`` is refused and changes nothing."""
    before = state_of(g)
    with pytest.raises(error, match=message):
        call(g)
    assert state_of(g) == before


def goes_on(g):
    """Require that the ranks are in the state of ranks without a mistake."""
    assert g.backend.all_reduce(np.ones(1))[0] == 2
    g.optimizer.step(g.model, X, Y)


def refused_alone(g, error, message, call):
    """Fail if a collective begins before the refusal."""
    g.backend.barrier()
    g.backend.traffic.reset()
    sequence = g.backend._sequence
    refused(g, error, message, call)
    assert (g.backend._sequence, dict(g.backend.traffic.calls)) == (sequence, {})
    assert g.backend.traffic.total_bytes == 0
