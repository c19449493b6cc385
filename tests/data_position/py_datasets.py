"""PyDatasets that shuffle in their hooks, of the ids of `data_runs`."""

import keras
import numpy as np
from data_runs import BATCH, IDS
from recovered_runs import STEPS


class Shuffled(keras.utils.PyDataset):
    """The ids, shuffled by `shuffle(indexes)` in the given hooks; with noise in hundreds."""

    def __init__(self, shuffle, hooks=("__init__", "on_epoch_end"), noise=None, **arguments):
        super().__init__(**arguments)
        self.indexes, self._shuffle, self._hooks, self._noise = np.arange(len(IDS)), shuffle, hooks, noise
        self._call("__init__")

    def _call(self, hook):
        if hook in self._hooks:
            self._shuffle(self.indexes)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        ids = IDS[self.indexes[index * BATCH : (index + 1) * BATCH]]
        return (ids if self._noise is None else ids + 100 * self._noise(),)

    def on_epoch_begin(self):
        self._call("on_epoch_begin")

    def on_epoch_end(self):
        self._call("on_epoch_end")


def noise():
    return np.random.randint(1, 9)


class NoisyInSome(Shuffled):
    """Draws only in the batches after the third."""

    def __getitem__(self, index):
        (ids,) = super().__getitem__(index)
        return (ids + 100 * noise() if index > 2 else ids,)


class Remembering(Shuffled):
    """Has a state: its order and its generator, from which it also draws noise."""

    def __init__(self, seed, **arguments):
        self.generator, self.calls = np.random.default_rng(seed), 0
        super().__init__(self.generator.shuffle, noise=lambda: self.generator.integers(1, 9), **arguments)

    def _call(self, hook):
        super()._call(hook)
        self.calls += 1

    def get_state(self):
        return {"indexes": self.indexes, "generator": self.generator.bit_generator.state}

    def set_state(self, state):
        self.indexes[:], self.generator.bit_generator.state = state["indexes"], state["generator"]
