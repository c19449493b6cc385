"""Several ranks in one process: a key-value store in memory in place of the one that TensorFlow's chief serves."""

import itertools
import threading

import pytest
import tensorflow as tf

from tfdist.recovery import agreement

_LIMIT_SECONDS = 30


class Told:
    """What the ranks have told.

    Attributes:
      values: by key.
      before_shared: called with a key that a rank asks for, before it is given the value.
    """

    def __init__(self):
        self.values = {}
        self.before_shared = lambda key: None
        self._changed = threading.Condition()

    def share(self, key, value):
        with self._changed:
            if key in self.values:
                raise tf.errors.AlreadyExistsError(None, None, key)
            self.values[key] = value
            self._changed.notify_all()

    def shared(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, _LIMIT_SECONDS), f"nobody has told {key}"
        self.before_shared(key)
        return self.values[key]


@pytest.fixture
def told(monkeypatch):
    store = Told()
    monkeypatch.setattr(agreement, "share", store.share)
    monkeypatch.setattr(agreement, "shared", store.shared)
    return store


@pytest.fixture
def agreements(monkeypatch, told):
    """Makes the agreements of the ranks of one `fit`, as their processes would."""
    fits = itertools.count()

    def make(workers):
        fit, made = next(fits), []
        for rank in range(workers):
            monkeypatch.setattr(agreement, "_agreements", itertools.count(fit))
            made.append(agreement.Agreement(rank, workers))
        return made

    return make


@pytest.fixture
def in_threads():
    """Calls a function with each rank in a thread of its own; returns what each returned."""

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
