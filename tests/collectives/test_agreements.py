"""Values that workers exchange while they create a strategy."""

import pytest
import tensorflow as tf

from tfdist.collectives.key_values import KeyValues
from tfdist.exchange.exchange_errors import WorkerLostError


class Store(dict):
    """The key-value store of a cluster."""

    def publish(self, key, value, only_for=None):
        self[key] = value

    def wait_for(self, key, timeout_seconds=None):
        if key == "lost/1":
            raise WorkerLostError(1, "its process has ended", "no exchange")
        return self.get(key)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def key_values(store):
    values = KeyValues()
    values.use(store)
    values.limit_start(0.5)
    return values


def test_all_workers_get_the_values_of_all(store, key_values):
    store["seed/1"] = "b"
    assert key_values.exchange("seed", "a", 0, 2) == ["a", "b"]


def test_a_worker_that_creates_another_strategy_is_named(key_values):
    with pytest.raises(TimeoutError, match=r"Worker 1 does not create the strategy.*no answer for 'seed' in 0.5 s"):
        key_values.exchange("seed", "a", 0, 2)


def test_a_lost_worker_is_an_error_of_tensorflow(key_values):
    with pytest.raises(tf.errors.UnavailableError, match="Worker 1 is lost"):
        key_values.exchange("lost", "a", 0, 2)
