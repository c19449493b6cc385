"""What stands for PyTorch and torchdata where they are not installed: their documented interface, in NumPy.

`install` puts the modules `torch` and `torch.utils.data` in place, by which Keras knows a `DataLoader`.
"""

import sys
import types

import numpy as np

_torch = types.ModuleType("torch")
_torch.utils = types.ModuleType("torch.utils")
_torch.utils.data = types.ModuleType("torch.utils.data")
_common = [0]  # the state of the global generator


class Tensor(np.ndarray):
    """An array with the methods of a tensor that are used."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


Tensor.__module__ = "torch"


def tensor(value, dtype=None):
    return np.asarray(value, dtype).view(Tensor)


class Generator:
    """Numbers that depend on how often it was drawn from."""

    def __init__(self, state=0):
        self._state = [state]

    def get_state(self):
        return tensor(self._state)

    def set_state(self, state):
        self._state[:] = [int(state[0])]

    def manual_seed(self, seed):
        self._state[:] = [seed]
        return self

    def draw(self):
        self._state[0] += 1
        return np.random.default_rng(self._state[0])


class DataLoader:
    """Batches of a dataset, in an order that is drawn for each iterator."""

    def __init__(self, dataset, batch_size=1, shuffle=False, generator=None):
        self.dataset, self.batch_size, self._shuffle, self.generator = dataset, batch_size, shuffle, generator

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self):
        return _Iterator(self)


DataLoader.__module__ = "torch.utils.data.dataloader"


class StatefulDataLoader(DataLoader):
    """Has a state, which is that of its newest iterator. An iterator at the end yields nothing."""

    _newest = _saved = None

    def __iter__(self):
        saved, self._saved = self._saved, None
        self._newest = _Iterator(self, saved)
        return self._newest

    def state_dict(self):
        if self._newest is None:
            iter(self)
        return self._newest.state_dict()

    def load_state_dict(self, state):
        self._saved = state


class _Iterator:
    def __init__(self, loader, saved=None):
        self._loader, self._drawn = loader, 0
        generator = loader.generator or _of_global()
        self._shuffle(generator)
        generator.draw()  # a seed, also for an iterator that continues, which discards the order above
        if saved is not None:
            self._drawn = saved[0]["drawn"]
            generator.set_state(saved[0]["generator"])
            self._shuffle(generator)

    def _shuffle(self, generator):
        self._began, numbers = generator.get_state(), np.arange(len(self._loader.dataset))
        self._order = generator.draw().permutation(numbers) if self._loader._shuffle else numbers

    def __iter__(self):
        return self

    def __next__(self):
        if self._drawn == len(self._loader):
            raise StopIteration
        size = self._loader.batch_size
        samples = [self._loader.dataset[int(i)] for i in self._order[self._drawn * size :][:size]]
        self._drawn += 1
        return [tensor(np.stack(parts)) for parts in zip(*samples, strict=True)]

    def state_dict(self):
        samples = getattr(self._loader.dataset, "state_dict", lambda: None)()
        return {0: {"drawn": self._drawn, "generator": self._began, "kind": b"iterator"}, "samples": samples}


def _of_global():
    generator = Generator()
    generator._state = _common
    return generator


def _set_rng_state(state):
    _common[0] = int(state[0])


_torch.Tensor, _torch.Generator, _torch.tensor, _torch.from_numpy = Tensor, Generator, tensor, tensor
_torch.get_rng_state, _torch.set_rng_state = lambda: tensor(_common), _set_rng_state
_torch.manual_seed = lambda seed: _common.__setitem__(0, seed)
_torch.randint = lambda low, high, shape: tensor(_of_global().draw().integers(low, high, shape))
_torch.utils.data.DataLoader = DataLoader


def install(monkeypatch):
    """Puts the modules in place for a test; returns the functions of `torch`, and the class of the loader."""
    for module in (_torch, _torch.utils, _torch.utils.data):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return _torch, StatefulDataLoader
