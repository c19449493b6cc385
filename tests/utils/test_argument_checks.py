"""Numeric arguments: NumPy's scalars are numbers, booleans and what is not finite are not."""

import numpy as np
import pytest

from tfdist.utils.argument_checks import is_number, is_whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_type_are_whole_numbers(value):
    assert is_whole_number(value, at_least=3) and not is_whole_number(value, at_least=4)


@pytest.mark.parametrize("value", [2.5, np.float32(2.5), "3", None, True, np.True_, float("nan"), [3]])
def test_no_whole_number(value):
    assert not is_whole_number(value, at_least=0)


@pytest.mark.parametrize("value", [0, 2.5, np.float32(2.5), np.float64(0), np.int32(7)])
def test_finite_numbers_of_any_type_are_numbers(value):
    assert is_number(value, at_least=0)


@pytest.mark.parametrize("value", [float("inf"), np.float32("nan"), 10**400, -1, True, np.True_, "1", None])
def test_no_number(value):
    assert not is_number(value, at_least=0)
