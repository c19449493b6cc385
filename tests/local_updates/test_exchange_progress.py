"""Workers note the exchanges that they have started, and name those that have not."""

import pytest

from tfdist.local_updates import local_updates as exchange_progress
from tfdist.local_updates.local_updates import ExchangeProgress


@pytest.fixture
def store(monkeypatch):
    """The key-value store of the cluster."""
    store = {}
    monkeypatch.setattr(exchange_progress.key_values, "publish", store.__setitem__)
    monkeypatch.setattr(exchange_progress.key_values, "withdraw", store.__delitem__)
    monkeypatch.setattr(exchange_progress.key_values, "is_published", lambda key, seconds: key in store)
    return store


def test_a_second_call_names_the_workers_that_have_not_started(store):
    first, second, third = (ExchangeProgress("exchanges", rank, 3) for rank in range(3))
    assert first.late_workers(0) == ""  # it has just started, as perhaps all have
    assert first.late_workers(0) == "worker 1, worker 2"
    assert second.late_workers(0) == ""
    assert first.late_workers(0) == "worker 2"
    assert third.late_workers(0) == first.late_workers(0) == ""


def test_notes_that_all_workers_have_passed_are_deleted(store):
    progress = ExchangeProgress("exchanges", 0, 2)
    for exchange in range(5):
        progress.late_workers(exchange)
    assert sorted(store) == ["exchanges/3/0", "exchanges/4/0"]
