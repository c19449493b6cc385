"""The start timeout of strategies: the argument, the environment variable, and the default."""

import pytest

from tfdist.strategies.cluster_resolver import start_timeout_of


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "0", "-3"])
def test_start_timeout_variable_is_checked(monkeypatch, value):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"variable TFDIST_START_TIMEOUT. Received: TFDIST_START_TIMEOUT='{value}'"):
        start_timeout_of(None)
    assert start_timeout_of(7) == 7


def test_start_timeout_by_default(monkeypatch):
    monkeypatch.delenv("TFDIST_START_TIMEOUT", raising=False)
    assert start_timeout_of(None) == 300
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "2.5")
    assert start_timeout_of(None) == 2.5
