"""Modes are values and check their arguments."""

import re

import pytest

from tfdist.parameter_server.modes import Asynchronous, Synchronous


@pytest.mark.parametrize(
    ("mode", "argument", "value"), [(Asynchronous, "max_staleness", 3), (Synchronous, "backup_workers", 1)]
)
@pytest.mark.parametrize("wrong", [-1, 1.0, True, "2"])
def test_modes_take_integers(mode, argument, value, wrong):
    assert getattr(mode(**{argument: value}), argument) == value
    with pytest.raises(ValueError, match=f"Invalid `{argument}`. Received: {re.escape(repr(wrong))}. Expected"):
        mode(**{argument: wrong})


def test_modes_are_values():
    assert Synchronous(1) == Synchronous(backup_workers=1) != Synchronous()
    with pytest.raises(AttributeError):
        Asynchronous().max_staleness = 3
