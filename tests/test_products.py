"""Which library multiplies float32, and that both give right products of every layout."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from mpishard import nn
from mpishard.base import onednn, products
from mpishard.base.blas import Processor
from mpishard.communication import MPICommunicationBackend
from mpishard.nn.layers.products import product
from mpishard.sharding import numerics_fingerprint


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Sets MPISHARD_PRODUCTS in a process that is no rank yet, and whose user keeps no choice."""

    def set_choice(value: str) -> None:
        monkeypatch.setenv("MPISHARD_PRODUCTS", value)
        products.float32_library.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_agreed", [])
    monkeypatch.setattr(products, "_blas_threads", lambda: 1)
    set_choice("auto")
    yield set_choice
    products.float32_library.cache_clear()


@pytest.fixture
def calls(choose, monkeypatch):
    """Names of oneDNN's products from here on: "computed", or "refused" for NumPy to compute."""
    if onednn.find_library() is None:
        pytest.skip(onednn.reason_for_no_library())
    choose("onednn")
    done: list[str] = []
    multiply = onednn.Library.multiply

    def counted(self, *arrays):
        is_computed = multiply(self, *arrays)
        done.append("computed" if is_computed else "refused")
        return is_computed

    monkeypatch.setattr(onednn.Library, "multiply", counted)
    return done


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


RECORDS = np.zeros((128, 128), [("flag", "i1"), ("value", "f4")])["value"]  # steps of 5 bytes
RECORDS[:] = random(128, 128)

OPERANDS = {
    "plain": (random(96, 128), random(128, 90), "computed"),
    "transposed": (random(128, 96).T, random(90, 128).T, "computed"),
    "columns of wider matrices": (random(96, 300)[:, 5:133], random(128, 99)[:, 7:97], "computed"),
    "every other row": (random(192, 128)[::2], random(256, 90)[::2], "computed"),
    "heads": (
        random(2, 96, 4, 128).swapaxes(1, 2), random(2, 96, 4, 128).transpose(0, 2, 3, 1), None,
    ),
    "a matrix for all of a batch": (random(96, 128), random(5, 128, 90), None),
    "every other column": (random(96, 256)[:, ::2], random(128, 90), "refused"),
    "one row repeated": (np.broadcast_to(random(128), (96, 128)), random(128, 90), "refused"),
    "rows backwards": (random(96, 128)[::-1], random(128, 90), "refused"),
    "fields of records": (RECORDS, random(128, 90), "refused"),
    "one row": (random(1, 1024), random(1024, 1024), None),
    "one column": (random(1024, 1024), random(1024, 1), None),
    "small": (random(16, 32), random(32, 32), None),
    "empty": (random(96, 0), random(0, 80), None),
    "float64": (random(96, 128).astype(np.float64), random(128, 90).astype(np.float64), None),
    "of another byte order": (
        random(96, 128).astype(">f4"), random(128, 90).astype(">f4"), None,
    ),
    "of two dtypes": (random(96, 128), random(128, 90).astype(np.float64), None),
}  # fmt: skip
"""Two operands, and what oneDNN does; None if it is not called."""


@pytest.mark.parametrize("case", OPERANDS)
@pytest.mark.parametrize("options", ["", "bias", "out", "part of out"])
def test_products_are_right(calls, case: str, options: str) -> None:
    a, b, expected = OPERANDS[case]
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    size = np.matmul(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    bias = random(b.shape[-1], seed=1) if options == "bias" else None
    out = None
    if "out" in options:
        whole = np.empty((*exact.shape[:-1], exact.shape[-1] + 3), np.result_type(a, b))
        out = whole[..., 3:] if options == "part of out" else np.ascontiguousarray(whole[..., 3:])
    y = product(a, b, out, bias=bias)
    assert y is out if out is not None else y.dtype == np.result_type(a, b)
    if bias is not None:
        exact, size = exact + bias, size + np.abs(bias)
    assert (np.abs(y - exact) <= 1e-6 * size).all()
    assert calls == ([] if expected is None else [expected])


def test_threads_multiply_at_the_same_time(calls) -> None:
    a, b = random(96, 300), random(300, 50, seed=1)
    expected, wrong = product(a, b), []

    def multiply() -> None:
        wrong.extend(n for n in range(30) if not np.array_equal(product(a, b), expected))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert calls == ["computed"] * 121


def test_layers_multiply_by_the_chosen_library(calls, choose) -> None:
    model = nn.GPT(vocabulary_size=64, context_length=64, width=64, layers=1, heads=2)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 64))
    y = model.predict(tokens)
    # Attention's input and output, two linear layers, the head; NumPy multiplies heads.
    assert calls == ["computed"] * 5
    choose("numpy")
    np.testing.assert_allclose(model.predict(tokens), y, rtol=1e-5, atol=1e-6)
    assert len(calls) == 5


# -------------------------------------------------------------------------------------- the choice


def test_the_choice_is_kept_for_each_processor(choose, monkeypatch) -> None:
    assert products.choice() == "numpy"  # without any measurement, on every processor
    products.keep("onednn")
    assert products.choice() == "onednn"
    with monkeypatch.context() as patched:
        patched.setattr(Processor, "of_this_machine", lambda: Processor("", 0, frozenset(), "B"))
        assert products.choice() == "numpy"
        products.keep("numpy")
    assert products.choice() == "onednn"
    choose("numpy")
    assert products.choice() == "numpy"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": []}', "\xff"])
def test_a_damaged_file_chooses_nothing(choose, text: str) -> None:
    products.keep("onednn")
    products.kept_choices().write_bytes(text.encode("latin1"))
    assert products.choice() == "numpy"


def test_ranks_take_rank_0s_choice(choose, monkeypatch) -> None:
    if onednn.find_library() is None:
        pytest.skip(onednn.reason_for_no_library())
    assert products.float32_products() == numerics_fingerprint()["products"] == "NumPy"
    products.agree("onednn")
    assert products.float32_products() == numerics_fingerprint()["products"] != "NumPy"
    # Its products are computed on one thread.
    monkeypatch.setattr(products, "_blas_threads", lambda: 2)
    products.agree("onednn")
    assert products.float32_products() == "NumPy"


@pytest.mark.mpi
@pytest.mark.parametrize("chosen", ["onednn", "numpy"])
def test_ranks_of_a_job_agree(backend, choose, monkeypatch, chosen: str) -> None:
    other = "numpy" if chosen == "onednn" else "onednn"
    monkeypatch.setattr(products, "choice", lambda: other if backend.rank else chosen)
    MPICommunicationBackend(backend._comm).initialize()
    assert products._agreed == [chosen]


def test_a_choice_without_the_library(choose, monkeypatch) -> None:
    monkeypatch.setenv("MPISHARD_ONEDNN", "off")
    products.keep("onednn")
    assert products.float32_products() == "NumPy"
    choose("onednn")
    with pytest.raises(ValueError, match="MPISHARD_PRODUCTS=onednn, but MPISHARD_ONEDNN=off; NumP"):
        products.float32_products()
    choose("mkl")
    with pytest.raises(ValueError, match="MPISHARD_PRODUCTS must be auto, numpy or onednn; got 'm"):
        products.float32_products()


def test_speeds_are_measured(choose, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="mpishard")
    found = products.speeds()
    assert found.keys() == {"numpy"} | ({"onednn"} if onednn.find_library() else set())
    assert min(found.values()) > 1e8
    assert not caplog.records
