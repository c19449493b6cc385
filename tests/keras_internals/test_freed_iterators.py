"""Iterators of finished epochs are freed on another thread: freeing one may take a minute."""

import collections
import contextlib
import threading
import weakref

import keras
import numpy as np

from tfdist.keras_internals.keras_symbols import trainer
from tfdist.strategies import MirroredStrategy

_EPOCHS = 4


def test_no_epoch_waits_until_the_iterator_before_is_freed(cpus, monkeypatch):
    strategy = MirroredStrategy(cpus[:2])
    freed_by: collections.Counter[str] = collections.Counter()
    all_freed = threading.Event()

    def note():
        freed_by[threading.current_thread().name] += 1
        if freed_by.total() >= _EPOCHS - 1:
            all_freed.set()

    class Noted:
        def __init__(self, dataset):
            self.dataset = dataset

        def __iter__(self):
            iterator = iter(self.dataset)
            with contextlib.suppress(TypeError):  # an empty tuple's, after the last epoch
                weakref.finalize(iterator, note)
            return iterator

    datasets = trainer.TFEpochIterator._get_iterator
    monkeypatch.setattr(trainer.TFEpochIterator, "_get_iterator", lambda self: Noted(datasets(self)))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=4, epochs=_EPOCHS, verbose=0)
    assert all_freed.wait(60.0), freed_by
    assert freed_by["tfdist freed iterator"] == _EPOCHS - 1, freed_by
