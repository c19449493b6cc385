"""Several ranks in one process: a key-value store in memory in place of TensorFlow's."""

import contextlib
import itertools
import threading

import pytest
import tensorflow as tf
from replaced_clocks import set_clock

from tfdist.recovery import save_schedule, worker_coordination

_LIMIT_SECONDS = 30


class KeyValueStore:
    """The values that the ranks have set.

    Attributes:
      values: by key.
      before_read: called with a key before a rank gets its value.
      after_write: called with a key before a rank learns that its value is set.
      is_gone: set when the process of the chief, which contains the store, has exited: others get errors.
    """

    def __init__(self):
        self.values = {}
        self.before_read = self.after_write = lambda key: None
        self.is_gone = threading.Event()
        self._changed = threading.Condition()

    def publish(self, key, value, *, only_for=None):
        with self._changed:
            if key in self.values:
                raise tf.errors.AlreadyExistsError(None, None, key)
            self.values[key] = value
            self._changed.notify_all()
        self.after_write(key)
        self._raise_if_gone()

    def propose(self, key, value):
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.publish(key, value)
        return self.wait_for(key)

    def wait_for(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, _LIMIT_SECONDS), f"nobody has set {key}"
        self.before_read(key)
        self._raise_if_gone()
        return self.values[key]

    def take(self, key):
        self.wait_for(key)
        return self.values.pop(key)

    def is_published(self, key, within_seconds):
        with self._changed:
            return self._changed.wait_for(lambda: key in self.values, within_seconds)

    def _raise_if_gone(self):
        if self.is_gone.is_set():
            raise tf.errors.UnavailableError(None, None, "Connection reset by peer")


@pytest.fixture
def key_values(monkeypatch):
    store = KeyValueStore()
    monkeypatch.setattr(worker_coordination, "key_values", store)
    return store


@pytest.fixture
def coordinations(monkeypatch, key_values):
    """Creates the coordination of each rank of one `fit`, as their processes would."""
    fits = itertools.count()

    def make(workers):
        fit, made = next(fits), []
        for rank in range(workers):
            monkeypatch.setattr(worker_coordination, "_counter", itertools.count(fit))
            made.append(worker_coordination.WorkerCoordination(rank, workers))
        return made

    return make


@pytest.fixture
def clock(monkeypatch):
    """The clock by which saves are due."""
    return set_clock(monkeypatch, save_schedule)


@pytest.fixture
def in_threads():
    """Calls a function with each rank in a separate thread; returns the results."""

    def run(function, ranks):
        results, errors = {}, []

        def call(rank):
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_SECONDS)
        assert not errors and len(results) == len(threads), errors
        return [results[rank] for rank in ranks]

    return run
