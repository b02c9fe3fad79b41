"""Compiled update rules: the bits of NumPy, on any array, in any process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from types import FunctionType

import numpy as np
import pytest

from mpishard.base import compilation, settings
from mpishard.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Cosine,
    Lion,
    PieceViews,
    RMSprop,
    Segment,
    UpdateContext,
    WarmUp,
)
from mpishard.optimizers.rules import compiled as module

LENGTH = 1_001  # not a multiple of any vector's length
STEPS = 12
SCHEDULE = WarmUp(3, Cosine(0.1, 8, minimum=1e-3))

RULES = {
    "sgd": SGD(0.1),
    "sgd, decay": SGD(SCHEDULE, weight_decay=0.3),
    "momentum": SGD(SCHEDULE, 0.9),
    "momentum, decay": SGD(0.1, 0.9, weight_decay=0.3),
    "nesterov": SGD(SCHEDULE, 0.8, nesterov=True, weight_decay=0.01),
    "adamw": AdamW(),
    "adamw, decay": AdamW(SCHEDULE, 0.8, 0.95, 1e-3, weight_decay=0.2),
    "adamw, betas of 0": AdamW(0.3, 0.0, 0.0),
    "adam": Adam(SCHEDULE),
    "adam, decay": Adam(SCHEDULE, 0.8, 0.95, 1e-3, weight_decay=0.2),
    "adagrad": Adagrad(SCHEDULE, weight_decay=0.1),
    "rmsprop": RMSprop(SCHEDULE),
    "rmsprop, momentum": RMSprop(0.01, momentum=0.7, weight_decay=0.1),
    "rmsprop, centered": RMSprop(0.01, centered=True),
    "rmsprop, all": RMSprop(SCHEDULE, momentum=0.7, centered=True, weight_decay=0.1),
    "lion": Lion(SCHEDULE),
    "lion, decay": Lion(SCHEDULE, 0.8, weight_decay=0.3),
    "clipped": Adam(SCHEDULE, weight_decay=0.2, clip_value=0.05),
    "options": AdamW(
        SCHEDULE,
        weight_decay=0.2,
        parameter_options={"b": {"weight_decay": 0, "learning_rate_scale": 0.3}},
    ),
}


@pytest.fixture
def numba():
    return pytest.importorskip("numba")


@pytest.fixture
def anew(monkeypatch):
    """Clear what the module has compiled and knows of numba, before and after the test."""

    def forget():
        compilation._numba.cache_clear()
        module._compile.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


def values(seed, dtype, length=LENGTH):
    """Return values of every magnitude, a fifth of them subnormal, infinite or NaN."""
    generator = np.random.default_rng(seed)
    found = generator.standard_normal(length) * 10.0 ** generator.integers(-12, 6, length)
    info = np.finfo(dtype)
    odd = [0.0, -0.0, info.smallest_subnormal, info.tiny, -info.tiny / 8, info.eps, info.max / 2]
    odd += [-info.max, np.inf, -np.inf, np.nan, 1.0, -1.0]
    where = generator.random(length) < 0.2
    found[where] = generator.choice(odd, where.sum())
    return found.astype(dtype)


def as_bits(array):
    """The bits, with one NaN for all: its sign and payload are either operand's."""
    array = array.copy()
    array[np.isnan(array)] = np.nan
    return array.view(f"u{array.itemsize}")


def train(rule, dtype, offset=0, length=LENGTH, make=values):
    """Parameters and state after some updates of a slice of longer arrays."""
    part = slice(offset, offset + length)
    p = make(1, dtype, length + 7)
    state = {name: np.zeros(length + 7, dtype) for name in rule.needed_state()}
    middle = length // 3
    segments = [Segment("a", 0, middle), Segment("b", middle, length)]
    for step in range(STEPS):
        g = make(2 + step, dtype, length + 7)
        g.flags.writeable = False
        context = UpdateContext(step + 1, rule.learning_rate(step), 0.37 / (step + 3))
        with np.errstate(all="ignore"):
            owned = {k: v[part] for k, v in state.items()}
            rule.update_all([PieceViews(p[part], g[part], owned, segments)], context)
    return [as_bits(array) for array in (p, *state.values())]


def tame(seed, dtype, length):
    return np.random.default_rng(seed).standard_normal(length).astype(dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "make"),
    [
        *((name, np.float32, values if number % 2 else tame) for number, name in enumerate(RULES)),
        *((name, np.float64, values) for name in [*RULES][::2]),
    ],
)
def test_bits_of_the_passes(numba, monkeypatch, set_numba, name, dtype, make):
    rule = RULES[name]
    ran = []
    compiled = module._compile
    monkeypatch.setattr(module, "_compile", lambda *given: ran.append(given) or compiled(*given))
    for offset, length in [(0, LENGTH), (1, 64), (3, 17), (5, 1), (2, 0)]:
        set_numba("off")
        expected = train(rule, dtype, offset, length, make)
        assert not ran
        set_numba("auto")
        found = train(rule, dtype, offset, length, make)
        assert len(ran) >= STEPS * (length > 0)
        ran.clear()
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_body_means_the_same_for_elements_and_for_arrays(monkeypatch, set_numba, rule, dtype):
    def interpreted(function, arrays):
        names = {**function.__globals__, "elements": range}
        return FunctionType(function.__code__, names)

    set_numba("off")
    expected = train(rule, dtype, length=97)
    monkeypatch.setattr(module, "_machine_code", interpreted)
    for a, b in zip(expected, train(rule, dtype, length=97), strict=True):
        np.testing.assert_array_equal(a, b)


def arrays(dtype="float32", count=4):
    return [np.ones(8, dtype) for _ in range(count)]


def is_compiled(rule, arrays):
    body = rule.body(0.1, 0.0, UpdateContext(1, 0.1, 1.0))
    module.run(body, [*arrays, *[None] * (2 + len(rule.state_names) - len(arrays))])
    return module._machine_code(body.function, arrays) is not None


def test_arrays_that_numpy_keeps(numba):
    rule = AdamW()
    assert is_compiled(rule, arrays())
    p, g, m, v = arrays()
    odd = np.zeros(33, np.uint8)[1:].view(np.float32)
    read_only = np.ones(8, np.float32)
    read_only.flags.writeable = False
    function = rule.body(0.1, 0.0, UpdateContext(1, 0.1, 1.0)).function
    for other in (p[::2], p.astype("f8"), p.astype(">f4"), odd, p.view(np.memmap), read_only):
        assert module._machine_code(function, [p, g, other, v]) is None
    assert is_compiled(rule, [p, read_only, m, v])
    assert not is_compiled(rule, arrays("float16"))
    assert not is_compiled(rule, arrays("complex64"))


def test_without_numba(anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not module.uses_numba()
    assert not is_compiled(AdamW(), arrays())
    assert len(train(AdamW(), np.float32)) == 3


def test_numba_that_refuses_this_numpy(anew, monkeypatch, tmp_path, caplog):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 1.26 or less')\n")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.INFO, logger="mpishard"):
        assert not is_compiled(SGD(), arrays(count=2))
        assert not is_compiled(SGD(), arrays(count=2))
    assert [record.message for record in caplog.records] == [
        "loops run in NumPy, because numba cannot be imported: Numba needs NumPy 1.26 or less"
    ]


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("disk is full")])
def test_nowhere_to_keep_machine_code(numba, anew, monkeypatch, caplog, error):
    njit = numba.njit

    def failing(signature, *, cache=False, **options):
        if cache:
            raise error
        return njit(signature, **options)

    monkeypatch.setattr(numba, "njit", failing)
    with caplog.at_level(logging.INFO, logger="mpishard"):
        p, g = arrays(count=2)
        module.run(SGD().body(0.1, 0.0, UpdateContext(1, 0.1, 1.0)), [p, g, None])
    assert (p == np.float32(0.9)).all()
    assert str(error) in caplog.text


def test_threads_that_come_at_the_same_time(numba, anew):
    results, gate = [], threading.Barrier(6)

    def work():
        gate.wait()
        results.append(train(AdamW(weight_decay=0.1), np.float32))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for found in results:
        for a, b in zip(results[0], found, strict=True):
            np.testing.assert_array_equal(a, b)


_PROCESS = """
import sys
import numpy as np
from mpishard.optimizers import AdamW, PieceViews, Segment, UpdateContext
p, g, m, v = (np.ones(5, sys.argv[1]) for _ in range(4))
state = {"first_moment": m, "second_moment": v}
owned = PieceViews(p, g, state, [Segment("w", 0, 5)])
AdamW(0.5).update_all([owned], UpdateContext(1, 0.5, 1.0))
print(p.tobytes().hex())
"""


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_processes_that_fill_one_cache_at_the_same_time(numba, tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    given, written = [], []
    for is_full, dtypes in ((False, ("float32", "float64", "float32")), (True, ("float64",))):
        jobs = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _PROCESS, dtype],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for dtype in dtypes
        ]
        texts = [job.communicate(timeout=50)[0] for job in jobs]
        assert {job.returncode for job in jobs} == {0}
        given.append(texts)
        found = [(file, file.stat().st_mtime_ns) for file in sorted(tmp_path.rglob("*.nb?"))]
        assert len(found) == 4
        assert not is_full or found == written
        written = found
    shared, (alone,) = given
    assert shared[0] == shared[2] != shared[1] == alone


class Signed(SGD):
    """A rule of a user, whose body only NumPy can run."""

    def body(self, learning_rate, weight_decay, context):
        def signed(p, g, velocity):
            assert velocity is None
            p -= learning_rate * np.sign(g)

        return module.Body(signed, ())


def test_a_closure_is_run_by_numpy():
    p, g = np.zeros(2), np.array([3.0, -3.0])
    Signed(0.5).update(p, g, {}, [Segment("w", 0, 2)], UpdateContext(1, 0.5, 1.0))
    assert p.tolist() == [-0.5, 0.5]


def test_an_unknown_value_of_the_environment_variable_is_refused(set_numba):
    set_numba("maybe")
    with pytest.raises(ValueError, match="MPISHARD_NUMBA must be auto or off; got 'maybe'"):
        settings.check()
