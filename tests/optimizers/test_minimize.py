"""`minimize` and the rules with a line search, against SciPy and on every number of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy  # loads scipy.optimize in the tests that need it
from computed_once import computed_once

import mpishard as ms
from mpishard.checkpoint.format import disk
from mpishard.errors import (
    CheckpointError,
    NonFiniteLossError,
    PeerError,
    Preempted,
    ShardingError,
)
from mpishard.observe import open_trace, read_metrics, summarize_trace, trace
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers import LBFGS
from mpishard.optimizers.rules.strong_wolfe import StrongWolfe
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(7)
X = generator.standard_normal((61, 5))
Y = np.sign(X @ np.arange(-2, 3) + 0.5 * generator.standard_normal(61))
START = np.zeros(5)


def rosenbrock(theta):
    return scipy.optimize.rosen(theta), scipy.optimize.rosen_der(theta)


def far(length):
    return np.where(np.arange(length) % 2, 1.0, -1.2)


def logistic(theta, x, y):
    """Mean logistic loss, with a penalty."""
    margin = y * (x @ theta)
    gradient = -x.T @ (y / (1 + np.exp(margin))) / len(x) + 1e-3 * theta
    return np.logaddexp(0, -margin).mean() + 5e-4 * theta @ theta, gradient


def scipy_values(fun, theta, args=(), **options):
    values = []
    scipy.optimize.minimize(
        fun,
        theta,
        args,
        "L-BFGS-B",
        jac=True,
        options=options,
        callback=lambda intermediate_result: values.append(float(intermediate_result.fun)),
    )
    return np.array(values)


def own_values(backend, fun, theta, args=(), **arguments):
    values = []
    found = ms.minimize(
        fun,
        theta,
        args,
        backend=backend,
        **arguments,
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
    )
    return np.array(values), found


@pytest.mark.parametrize("length", [2, 10_000])
@in_worlds(1, 2, 3)
def test_the_iterates_on_rosenbrocks_function_are_scipys(backend, length):
    expected = scipy_values(rosenbrock, far(length), maxiter=21)[:20]
    values, found = own_values(backend, rosenbrock, far(length), options={"maxiter": 21})
    np.testing.assert_allclose(values[:20], expected, rtol=1e-6)
    assert (found.nit, found.status, found.success) == (21, 1, False)
    assert found["x"] is found.x
    assert found.x.shape == found.jac.shape == (length,)


@in_worlds(1, 2, 3, 4)
def test_the_iterates_of_logistic_regression_are_scipys_and_all_ranks_have_the_same_bits(backend):
    expected = scipy_values(logistic, START, (X, Y))
    values, found = own_values(backend, logistic, START, (X, Y))
    assert len(values) >= len(expected) - 1
    np.testing.assert_allclose(values[:20], expected[: len(values)][:20], rtol=1e-6)
    assert found.success
    bits = backend.all_gather(np.concatenate([found.x, found.jac, [found.fun]])[None])
    assert (bits == bits[0]).all()
    again = ms.minimize(logistic, START, (X, Y), backend=backend)
    assert again.x.tobytes() == found.x.tobytes()


def test_the_inverse_problem_of_the_example_takes_scipys_steps():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        import fit_autograd
    finally:
        sys.path.pop(0)
    from autograd import value_and_grad

    heated, seen = fit_autograd.measure(6)
    shape = (fit_autograd.CELLS, fit_autograd.CELLS)
    both = value_and_grad(lambda field, u, s: fit_autograd.loss({"log_field": field}, u, s))

    def fun(theta, u, s):
        loss, gradient = both(theta.reshape(shape), u, s)
        return 1e3 * loss, 1e3 * gradient.ravel()

    start = np.zeros(shape[0] * shape[1])
    limits = {"maxiter": 10, "ftol": 0, "gtol": 0}
    expected = scipy_values(fun, start, (heated, seen), **limits)
    values, _ = ms.run_in_threads(2, own_values, fun, start, (heated, seen), options=limits)[0]
    assert len(values) == 10
    np.testing.assert_allclose(values, expected, rtol=1e-6)


@in_worlds(1, 3)
def test_scipys_name_of_the_method_is_accepted_and_its_minimum_found(backend):
    found = ms.minimize(rosenbrock, far(3), method="l-bfgs-b", backend=backend, options={"ftol": 0})
    assert found.success, found
    np.testing.assert_allclose(found.x, 1, atol=1e-4)
    with pytest.raises(AttributeError, match="the result has no 'hess_inv', but x, fun"):
        _ = found.hess_inv


@in_worlds(1, 2, 3)
def test_bounds_hold_at_every_evaluation_and_the_minimum_is_scipys(backend):
    low, high = [None, 0.2, None, -3.0, 0.1], [0.1, 3.0, 0.3, None, 0.1]
    pairs = list(zip(low, high, strict=True))
    seen = []

    def watched(theta, x, y):
        seen.append(theta.copy())
        return logistic(theta, x, y)

    expected = scipy.optimize.minimize(logistic, START, (X, Y), jac=True, bounds=pairs)
    for bounds in (
        pairs,
        scipy.optimize.Bounds(
            *(
                [sign * np.inf if b is None else b for b in side]
                for side, sign in ((low, -1), (high, 1))
            )
        ),
    ):
        found = ms.minimize(watched, START, (X, Y), backend=backend, bounds=bounds)
        assert found.success
        assert found.fun <= expected.fun + 1e-8
        np.testing.assert_allclose(found.x, expected.x, atol=1e-3)
    evaluated = np.array(seen)
    assert (evaluated >= np.array([-np.inf if b is None else b for b in low])).all()
    assert (evaluated <= np.array([np.inf if b is None else b for b in high])).all()


@in_worlds(2, 3, 4)
def test_a_rank_without_samples_and_uneven_ones_change_nothing(backend):
    (expected,) = ms.run_in_threads(
        1, lambda alone: ms.minimize(logistic, START, (X, Y), backend=alone)
    )
    cuts = [*[0, 40, 40, 61, 61][: backend.world_size], 61]
    mine = slice(*cuts[backend.rank : backend.rank + 2])
    found = ms.minimize(logistic, START, (X[mine], Y[mine]), backend=backend, local_data=True)
    np.testing.assert_allclose(found.x, expected.x, atol=1e-9)
    assert found.nit == expected.nit
    few = ms.minimize(logistic, START, (X[:1], Y[:1]), backend=backend)
    assert few.success


@in_worlds(1, 2, 3, 4)
def test_a_rank_allocates_2m_plus_6_vectors_of_its_part(backend):
    length, pairs = 1003, 4
    rule = LBFGS(memory=pairs)
    problem = ms.FunctionModel(lambda theta, x, y: rosenbrock(theta), far(length))
    model = ms.as_distributed(problem, backend, "zero2")
    optimizer = ms.as_distributed(rule, backend, "zero2")
    x = np.zeros((int(backend.rank == 0), 1))
    for _ in range(3):
        optimizer.step(model, x, x)
    part = ms.ShardLayout(length, backend.world_size).size(backend.rank)
    state = model.memory.peak(MemoryCategory.OPTIMIZER_STATE)
    assert state == (2 * pairs + 3) * part * 8
    reduced = model.memory.peak(MemoryCategory.GRADIENTS)
    # The rank's part of parameters and of the reduced gradient are the other two.
    assert state + reduced + part * 8 <= (2 * pairs + 6) * part * 8
    assert sum(v.nbytes for v in optimizer.state.values()) == state


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path, monkeypatch, is_file
):
    evaluations = []

    def counted(*arguments):
        evaluations.append(arguments)
        return logistic(*arguments)

    if is_file:
        (tmp_path / "runs").touch()
    else:
        monkeypatch.setattr(disk.os, "access", lambda *_, **__: False)

    def main(backend):
        with pytest.raises(CheckpointError, match=r"cannot be (in|saved)"):
            ms.minimize(
                counted, START, (X, Y), backend=backend, checkpoint=tmp_path / "runs" / "run"
            )

    ms.run_in_threads(2, main)
    assert not evaluations


@in_worlds(1, 2, 3)
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(backend, shared_path, caplog):
    whole = ms.minimize(logistic, START, (X, Y), backend=backend)
    folder = {"checkpoint": shared_path / "run", "backend": backend}
    part = ms.minimize(
        logistic, START, (X, Y), **folder, checkpoint_every=2, options={"maxiter": 3}
    )
    assert part.nit == 3
    rest = ms.minimize(logistic, START, (X, Y), **folder, checkpoint_every=2)
    assert rest.x.tobytes() == whole.x.tobytes()
    assert (rest.nit, rest.nfev, rest.fun) == (whole.nit, whole.nfev, whole.fun)
    done = ms.minimize(logistic, START, (X, Y), **folder, resume=True)
    assert (done.nit, done.message) == (rest.nit, rest.message)
    assert "Objective" not in caplog.text


class Losses:
    """A callback that keeps the losses, also over a resume."""

    def __init__(self):
        self.kept = []

    def __call__(self, intermediate_result):
        self.kept.append(intermediate_result.fun)

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


@in_worlds(1, 3)
def test_metrics_and_the_losses_of_a_callback_go_on_after_a_resume(backend, shared_path):
    given = {"backend": backend, "checkpoint": shared_path / "run"}
    file, whole, part, rest = shared_path / "m.jsonl", Losses(), Losses(), Losses()
    ms.minimize(logistic, START, (X, Y), backend=backend, callback=whole)
    ms.minimize(
        logistic, START, (X, Y), **given, callback=part, metrics=file, options={"maxiter": 3}
    )
    assert part.kept == whole.kept[:3]
    with pytest.raises(ValueError, match="saved with the user_state 'callback Losses'"):
        ms.minimize(logistic, START, (X, Y), **given)
    result = ms.minimize(logistic, START, (X, Y), **given, callback=rest, metrics=file)
    assert rest.kept == whole.kept
    rows = read_metrics(file)
    assert [row["step"] for row in rows] == list(range(1, result.nit + 1))
    assert [row["loss"] for row in rows] == whole.kept
    assert rows[-1]["evaluations"] == result.nfev


def test_a_callback_with_a_state_that_thread_ranks_share_is_refused(tmp_path):
    def run(own, callback):
        return ms.minimize(
            logistic, START, (X, Y), backend=own, callback=callback, checkpoint=tmp_path / "run"
        )

    shared = Losses()
    for _ in range(2):  # The second time there is a checkpoint of a state of other losses.
        with pytest.raises(ShardingError, match="the callback Losses is one object"):
            ms.run_in_threads(2, lambda own: run(own, shared))
        assert shared.kept == []
        ms.run_in_threads(2, lambda own: run(own, Losses()))


@pytest.fixture
def alone():
    """The world of one that `minimize` makes without a backend; ended with the test."""
    with ms.init():
        yield


def partly_flat(theta, x, y):
    """Logistic loss that does not depend on the last parameter: its gradient there is -0."""
    value, gradient = logistic(theta[:-1], x, y)
    return value, np.append(gradient, -0.0)


WIDE = np.concatenate([X, X**2, np.sin(X)], axis=1)
BOX = ((None, 0.1), *[(-1, None)] * 15)


def bits_with_leaves(backend, bounds, fun=partly_flat, args=(WIDE, Y), limit=8, **given):
    """Return the bits of each iterate, and of the result."""
    seen = []
    found = ms.minimize(
        fun,
        np.zeros(16),
        args,
        backend=backend,
        bounds=bounds,
        **given,
        options={"gradient_leaves": 8, "maxiter": limit, "ftol": 0, "gtol": 0},
        callback=lambda intermediate_result: seen.append(
            (intermediate_result.fun, intermediate_result.x.tobytes())
        ),
    )
    return seen, found.x.tobytes(), found.jac.tobytes(), found.fun, found.nfev


def shifted_rosenbrock(theta):
    """A function without samples."""
    return rosenbrock(theta + 0.5)


@computed_once
def bits_of_one_rank(bounds, **given):
    return ms.run_in_threads(1, bits_with_leaves, bounds, **given)[0]


@pytest.mark.parametrize("bounds", [None, BOX])
@in_worlds(2, 3, 4, 8)
def test_gradient_leaves_make_all_iterates_the_same_bits(backend, bounds, shared_path):
    alone = bits_of_one_rank(bounds)
    assert bits_with_leaves(backend, bounds) == alone
    # Three iterations on another number of ranks, and the rest here.
    path = {"checkpoint": shared_path / "run"}
    if backend.rank == 0:
        other = 2 if backend.world_size == 3 else 3
        ms.run_in_threads(other, bits_with_leaves, bounds, limit=3, **path)
    backend.barrier()
    rest = bits_with_leaves(backend, bounds, **path)
    assert rest == (alone[0][3:], *alone[1:])
    if bounds is None:
        given = {"fun": shifted_rosenbrock, "args": ()}
        assert bits_with_leaves(backend, bounds, **given) == bits_of_one_rank(bounds, **given)


@pytest.mark.usefixtures("alone")
def test_a_run_goes_on_at_another_world_size(tmp_path):
    whole = ms.minimize(logistic, START, (X, Y))
    for size, limit in ((3, 2), (1, 4), (2, 15_000)):
        found = ms.run_in_threads(
            size,
            lambda backend, limit=limit: ms.minimize(
                logistic,
                START,
                (X, Y),
                backend=backend,
                checkpoint=tmp_path / "run",
                options={"maxiter": limit},
            ),
        )
    np.testing.assert_allclose(found[1].x, whole.x, atol=1e-8)
    assert found[1].nit == whole.nit


@pytest.mark.usefixtures("alone")
def test_preemption_saves_the_run_and_the_same_call_goes_on(tmp_path, monkeypatch):
    def call(callback=None):
        return ms.minimize(logistic, START, (X, Y), checkpoint=tmp_path / "run", callback=callback)

    def stop(theta):
        if not stop.asked:
            stop.asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    stop.asked = False
    with pytest.raises(Preempted, match="preempted after step 1 of 15000"):
        call(stop)
    whole = ms.minimize(logistic, START, (X, Y))
    assert call().x.tobytes() == whole.x.tobytes()


@in_worlds(1, 2, 3)
def test_a_value_that_is_not_finite_at_the_start_is_refused_and_shortens_a_search(backend):
    def beyond(theta, x):
        """Infinite, or NaN, where theta is above 1; its minimum is at 1."""
        if theta[0] > 1:
            return (np.inf if theta[0] > 5 else np.nan), np.array([np.nan])
        return (theta[0] - 1) ** 2, 2 * (theta - 1)

    x = np.zeros(5)
    found = ms.minimize(beyond, np.array([-9.0]), (x,), backend=backend)
    assert abs(found.x[0] - 1) < 1e-3
    with pytest.raises(NonFiniteLossError, match=r"the loss of ranks \[0") as caught:
        ms.minimize(beyond, np.array([3.0]), (x,), backend=backend)
    assert "begin at other parameters" in caught.value.__notes__[0]


@in_worlds(1, 2, 3)
def test_an_error_at_a_loss_of_nan_has_the_best_point(backend):
    """Rosenbrock's function is NaN beyond the point of some iteration."""
    whole = ms.minimize(rosenbrock, far(3), backend=backend, options={"maxiter": 9})
    evaluations = []

    def walled(theta):
        evaluations.append(theta)
        value, gradient = rosenbrock(theta)
        return (value, gradient) if len(evaluations) <= whole.nfev else (np.nan, gradient)

    with pytest.raises(NonFiniteLossError, match="is not finite") as caught:
        ms.minimize(walled, far(3), backend=backend)
    result = caught.value.result
    assert f"a loss of {whole.fun:.6g} after 9 iterations" in caught.value.__notes__[-1]
    assert result.x.tobytes() == whole.x.tobytes()
    assert result.jac.tobytes() == whole.jac.tobytes()
    assert (result.fun, result.nit, result.success, result.status) == (whole.fun, 9, False, 2)
    assert backend.rank or result.nfev == len(evaluations)
    with pytest.raises(NonFiniteLossError) as caught:
        ms.minimize(lambda theta: (np.nan, theta), far(3), backend=backend)
    assert caught.value.result is None


@in_worlds(2, 3)
def test_unequal_arguments_are_an_error_on_every_rank(backend):
    with pytest.raises(ValueError, match=r"same function; by rank, maxiter is 3, 4"):
        ms.minimize(
            logistic, START, (X, Y), backend=backend, options={"maxiter": min(4, 3 + backend.rank)}
        )
    with pytest.raises(ValueError, match="memory is 4, 5"):
        ms.minimize(
            logistic, START, (X, Y), backend=backend, options={"maxcor": min(5, 4 + backend.rank)}
        )
    with pytest.raises(ValueError, match="same function; by rank, gradient_leaves is 4, 8"):
        ms.minimize(
            logistic,
            START,
            (X, Y),
            backend=backend,
            options={"gradient_leaves": 4 + 4 * min(1, backend.rank)},
        )
    mine = slice(0, 60 + min(1, backend.rank))
    with pytest.raises(ValueError, match="samples is 60, 61"):
        ms.minimize(logistic, START, (X[mine], Y[mine]), backend=backend)


@in_worlds(1, 2)
def test_bad_arguments_are_refused_before_anything_is_communicated(backend):
    before = backend._sequence
    for error, match, theta, given in (
        (ValueError, "theta0 must be a non-empty 1-D vector", START[None], {}),
        (ValueError, "method must be L-BFGS .* got 'CG'; any other", START, {"method": "CG"}),
        (ValueError, "method must be L-BFGS .* got None", START, {"method": None}),
        (TypeError, "got ndarray; give all data as one tuple", START, {"method": START}),
        (ValueError, "no option 'maxit'; .* mean maxiter", START, {"options": {"maxit": 1}}),
        (ValueError, "maxiter must be 1 or more", START, {"options": {"maxiter": 0}}),
        (ValueError, "gtol must be 0 or more", START, {"options": {"gtol": np.nan}}),
        (ValueError, "bounds must be 5 pairs", START, {"bounds": [(0, 1)]}),
        (
            ValueError,
            r"bounds\[1\] must be low <= high",
            START,
            {"bounds": [(0, 1), (2, 1), *[(0, 1)] * 3]},
        ),
        (ValueError, "jac must be True", START, {"jac": False}),
        (TypeError, "callback must be a function, got 3", START, {"callback": 3}),
        (TypeError, "backend must be a Comm.*, got 'memory'", START, {"backend": "memory"}),
        (ValueError, "checkpoint_every needs checkpoint", START, {"checkpoint_every": 2}),
        (ValueError, "0 < c1 < c2", START, {"options": {"c1": 0.95}}),
        (ValueError, "power of two, .* got 3", START, {"options": {"gradient_leaves": 3}}),
        (
            ValueError,
            "=4 gives .* local_data=True would .* the same args",
            START,
            {"options": {"gradient_leaves": 4}, "local_data": True},
        ),
    ):
        with pytest.raises(error, match=match):
            ms.minimize(logistic, theta, (X, Y), **({"backend": backend} | given))
    with pytest.raises(ValueError, match=r"as many samples each, got \[61, 60\]"):
        ms.minimize(logistic, START, (X, Y[1:]), backend=backend)
    with pytest.raises(TypeError, match="fun must be a function"):
        ms.minimize(None, START, (X, Y), backend=backend)
    assert backend._sequence == before


@in_worlds(1, 2)
def test_jac_callback_and_integers_are_taken_as_scipy_takes_them(backend):
    seen = []

    def callback(theta):
        seen.append(theta.copy())
        if len(seen) == 3 and backend.rank == 0:
            raise StopIteration

    value, slope = scipy.optimize.rosen, scipy.optimize.rosen_der
    found = ms.minimize(value, [-1, 2], jac=slope, backend=backend, callback=callback)
    assert (found.nit, found.status, len(seen)) == (3, 99, 3)
    assert seen[-1].tobytes() == found.x.tobytes()
    assert "status: 99" in repr(found)
    whole = ms.minimize(value, [-1, 2], jac=slope, backend=backend, callback=seen.append)
    assert (whole.status, len(seen)) == (0, 3 + whole.nit)
    assert seen[-1].tobytes() == whole.x.tobytes()
    single = ms.minimize(lambda t, x: (t @ t, 2 * t), [2.0], X, backend=backend)
    assert single.success
    with pytest.raises(AttributeError, match="the result has no 'allvecs', but x, fun"):
        _ = single.allvecs


def test_a_rank_that_fails_is_every_ranks_error():
    def main(backend):
        def fun(theta, x, y):
            if backend.rank == 1:
                raise RuntimeError("a broken disk")
            return logistic(theta, x, y)

        try:
            ms.minimize(fun, START, (X, Y), backend=backend)
        except PeerError as error:
            assert error.rank == 1  # noqa: PT017
            raise

    with pytest.raises(RuntimeError, match="a broken disk"):
        ms.run_in_threads(3, main)


# ----------------------------------------------------------------------------- the line search


@pytest.mark.parametrize("c2", [0.1, 0.9])
@pytest.mark.parametrize("first", [1e-6, 1e-2, 1.0, 30.0, 1e6])
def test_a_search_takes_the_trials_of_more_and_thuente(first, c2):
    from scipy.optimize._dcsrch import DCSRCH

    for value, slope in (
        (lambda t: -t / (t**2 + 2), lambda t: (t**2 - 2) / (t**2 + 2) ** 2),
        (
            lambda t: (t + 0.004) ** 5 - 2 * (t + 0.004) ** 4,
            lambda t: 5 * (t + 0.004) ** 4 - 8 * (t + 0.004) ** 3,
        ),
        (lambda t: np.cosh(min(t, 50.0) - 3), lambda t: np.sinh(min(t, 50.0) - 3)),
    ):
        expected = []

        def counted(t, value=value, expected=expected):
            expected.append(t)
            return value(t)

        scipys = DCSRCH(counted, slope, 1e-3, c2, 0.1, 0.0, 1e10)
        scipys(first, value(0.0), slope(0.0))
        tried, ends = [], False
        search = StrongWolfe(float(value(0.0)), float(slope(0.0)), first, 1e10, 1e-3, c2)
        while not ends and len(tried) < 60:
            # As a checkpoint has it.
            search = StrongWolfe(**json.loads(json.dumps(asdict(search))))
            tried.append(search.step)
            ends = search.judge(float(value(search.step)), float(slope(search.step)))
        np.testing.assert_allclose(tried, expected[: len(tried)], rtol=1e-12)
        assert ends
        assert value(tried[-1]) <= value(0) + 1e-3 * tried[-1] * slope(0)


def test_line_search_ends_where_rounding_leaves_no_other_trial():
    """Values that rise by one rounding error everywhere, so that no trial decreases enough."""
    value, slope = 0.3373218375703244, -3.86e-22
    search = StrongWolfe(value, slope, 1.0, 1e10, 1e-3, 0.9)
    while not search.is_exhausted and search.trials < 20:
        assert not search.judge(np.nextafter(value, 1), slope)
    assert search.is_exhausted


@in_worlds(1, 2, 3, 4)
def test_rule_stops_at_the_minimum_although_shuffling_changes_the_rounding(backend):
    model = ms.as_distributed(ms.FunctionModel(logistic, START), backend, "zero2")
    optimizer = ms.as_distributed(LBFGS(), backend, "zero2")
    result = optimizer.optimize(run_data(model, y_train=Y, max_steps=300, epochs=300, shuffle=True))
    assert result.stopped_early
    least = scipy.optimize.minimize(logistic, START, (X, Y), jac=True, tol=1e-12).fun
    assert result.loss_history[-1] == pytest.approx(least, rel=1e-12)


# -------------------------------------------------------------------- the rule in training loops


def classified(backend, strategy, rule=None, **options):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, **options)
    model = ms.as_distributed(ms.nn.MLP([5, 4, 1], activation="tanh", seed=3), config, strategy)
    return model, ms.as_distributed(rule or LBFGS(memory=5), config, strategy)


def run_data(model, **given):
    data = {
        "model": model,
        "x_train": X,
        "y_train": Y[:, None],
        "batch_size": 61,
        "max_steps": 12,
        "shuffle": False,
        "progress": False,
    }
    return ms.OptimizationInputData(**(data | given))


@pytest.fixture(scope="module")
def textbook():
    """Losses at SciPy's iterates."""
    plain = ms.nn.MLP([5, 4, 1], activation="tanh", seed=3)

    def fun(theta, x, y):
        return plain.with_parameters(theta).compute_loss_and_gradients(x, y)

    start = plain.get_parameters()
    return np.array(
        [
            fun(start, X, Y[:, None])[0],
            *scipy_values(fun, start, (X, Y[:, None]), maxiter=12, maxcor=5, ftol=0, gtol=0),
        ]
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"])
@in_worlds(1, 2, 3)
def test_lbfgs_in_optimize_takes_scipys_steps_under_every_strategy(backend, strategy, textbook):
    if strategy == "pipeline" and backend.world_size == 3:
        return  # the model has too few layers
    model, optimizer = classified(backend, strategy)
    result = optimizer.optimize(run_data(model))
    np.testing.assert_allclose(result.loss_history, textbook[:12], rtol=1e-6)
    # The parameters are those of an accepted point, whose loss the next step returns.
    share = ms.ShardLayout(61, model.data_size).slice(model.data_rank)
    loss = optimizer.step(model, X[share], Y[share, None])
    np.testing.assert_allclose(loss, textbook[12], rtol=1e-6)
    assert optimizer.steps == 13


@in_worlds(1, 2, 4)
def test_gradient_leaves_give_the_same_bits_on_any_number_of_ranks(backend):
    def bits(own):
        model, optimizer = classified(own, "fsdp", gradient_leaves=4)
        optimizer.optimize(run_data(model, max_steps=6))
        return model.get_parameters().tobytes()

    (alone,) = ms.run_in_threads(1, bits)
    assert bits(backend) == alone


@in_worlds(1, 2, 3)
def test_a_training_run_with_lbfgs_resumes_and_serializes(backend, shared_path):
    model, optimizer = classified(backend, "fsdp")
    whole = optimizer.optimize(run_data(model))
    for steps in (5, 12):
        part, other = classified(backend, "fsdp" if steps == 5 else "zero1")
        result = other.optimize(run_data(part, max_steps=steps, checkpoint=shared_path / "run"))
    assert len(result.loss_history) == 7
    np.testing.assert_allclose(result.loss_history, whole.loss_history[5:], rtol=1e-9)
    np.testing.assert_allclose(part.get_parameters(), model.get_parameters(), rtol=1e-6, atol=1e-8)
    share = ms.ShardLayout(61, backend.world_size).slice(backend.rank)
    copy, third = classified(backend, "ddp")
    third.deserialize(other.serialize())
    copy.set_parameters(part.get_parameters())
    losses = [
        [o.step(m, X[share], Y[share, None]) for _ in range(2)]
        for m, o in ((part, other), (copy, third))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-9)


@in_worlds(1, 2)
def test_lbfgs_refuses_models_without_a_fixed_loss(backend):
    model, optimizer = classified(backend, "fsdp")
    with pytest.raises(ValueError, match=r"LBFGS compares .*, and batch_size 32 cuts"):
        optimizer.optimize(run_data(model, batch_size=32))
    with pytest.raises(NotImplementedError, match="needs the loss at several points"):
        optimizer.apply_gradients(model.get_parameters(), model)
    with model.accumulate(), pytest.raises(ValueError, match="keeps no batch"):
        optimizer.step(model, X, Y[:, None])
    with pytest.raises(NotImplementedError, match="needs the loss at several points"):
        LBFGS().update_parameters(np.ones(3), np.ones(3))
    for given, match in (
        (
            {"weight_decay": 0.1},
            "LBFGS compares .* weight_decay changes only the gradient",
        ),
        ({"clip_global_norm": 1.0}, "clip_global_norm changes only the gradient"),
        ({"parameter_options": {"*": {"learning_rate_scale": 2}}}, r"parameter_options\['\*'\]"),
        ({"memory": 0}, "memory must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            LBFGS(**given)
    chain = ms.nn.Sequential({"a": ms.nn.Linear(5, 1), "drop": ms.nn.Dropout(0.5)})
    random = ms.as_distributed(ms.nn.Model(chain, ms.nn.MSE(), input_shape=(5,)), backend)
    with pytest.raises(ValueError, match="remove the dropout layers"):
        ms.as_distributed(LBFGS(), backend).bind(random)


@in_worlds(1, 2)
def test_frozen_parameters_stay(backend):
    rule = LBFGS(parameter_options={"linear0.*": {"frozen": True}})
    model, optimizer = classified(backend, "fsdp", rule)
    before = model.get_parameters()
    optimizer.optimize(run_data(model, max_steps=5))
    changed = model.get_parameters() != before
    assert changed[-5:].all()
    assert not changed[:-5].any()


def test_a_trace_has_a_step_for_each_evaluation(tmp_path):
    def main(backend):
        with trace(tmp_path / "trace", backend):
            return ms.minimize(logistic, START, (X, Y), backend=backend)

    found = ms.run_in_threads(2, main)[0]
    summary = summarize_trace(open_trace(tmp_path / "trace"))
    assert [rank.steps for rank in summary.ranks] == [found.nfev] * 2


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        ((0.0, np.zeros(3)), ValueError, r"curve returned a gradient of shape \(3,\) for 2 param"),
        ((np.zeros(2), np.zeros(2)), ValueError, "the loss of curve must be one number"),
        (0.0, TypeError, r"curve must return \(loss, gradient\), got a float"),
    ],
)
def test_an_error_names_the_users_function(result, error, match):
    def curve(theta, x):
        return result

    def main(backend):
        ms.minimize(curve, np.zeros(2), (np.zeros((4, 2)),), backend=backend)

    with pytest.raises(error, match=match):
        ms.run_in_threads(2, main)
