"""Checks of values on a GPU are read by one copy."""

import pytest
from cupy_stand_in.counts import counting

from mpishard.nn.checks import deferred_checks, refuse_if_any


def refusal(name):
    def refuse():
        raise ValueError(f"{name} is refused")

    return refuse


def check_in_one_block(first, second, third):
    with deferred_checks():
        refuse_if_any(first, refusal("the first"))
        refuse_if_any(second, refusal("the second"))
        refuse_if_any(third, refusal("the third"))


def test_checks_of_a_block_are_read_once_and_the_first_error_is_raised(gpu):
    none, one = gpu.zeros(1), gpu.ones(1)
    with counting() as counts:
        check_in_one_block(none, none, none)
        with pytest.raises(ValueError, match="the second"):
            check_in_one_block(none, one, one)
    if hasattr(gpu, "__stand_in__"):
        assert counts.reads == 2


def test_a_check_outside_of_a_block_is_read_at_once(gpu):
    refuse_if_any(gpu.zeros(()), refusal("nothing"))
    with pytest.raises(ValueError, match="it is refused"):
        refuse_if_any(gpu.ones(()), refusal("it"))


def test_an_error_in_a_block_is_raised_before_its_checks_and_leaves_none_behind(gpu):
    def fail():
        with deferred_checks():
            refuse_if_any(gpu.ones(1), refusal("a value"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    check_in_one_block(gpu.zeros(1), gpu.zeros(1), gpu.zeros(1))
