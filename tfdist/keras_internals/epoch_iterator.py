"""Epoch iterators: all workers make the same number of steps, and a batch of data never crosses the network."""

import functools
from collections.abc import Callable
from typing import Any

from tfdist.keras_internals.symbols import trainer


def install_epoch_iterator(agree: Callable[[Any, int | None], int | None]) -> None:
    """Makes `fit`, `evaluate` and `predict` ask `agree(strategy, num_batches)` how many batches an epoch has.

    Keras takes the number from the worker's own data set; a worker with fewer batches would stop while the others
    wait for it in a collective.

    Args:
      agree: takes the strategy and the worker's own number (`None`: unknown), returns the number for all workers.
    """
    stock = trainer.TFEpochIterator

    class AgreedEpochIterator(stock):  # type: ignore[misc, valid-type]
        """Keras' epoch iterator with the number of batches that all workers have agreed on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._agreed_batches = self._num_batches = agree(self._distribute_strategy, self._num_batches)

        def reset(self) -> None:
            super().reset()
            self._num_batches = self._agreed_batches

    AgreedEpochIterator.__name__ = stock.__name__
    trainer.TFEpochIterator = AgreedEpochIterator


def install_local_build(local_values: Callable[[Any], Any]) -> None:
    """Makes Keras build models from the shapes of a worker's own data.

    Keras takes the mean of a whole batch of data over all replicas only to learn its shapes: it fails for strings and
    for a first batch that is not even, and sends the batch over the network.

    Args:
      local_values: called with a strategy; a context in which its `reduce` returns a local value as it is.
    """
    build = trainer.TensorFlowTrainer._maybe_symbolic_build

    @functools.wraps(build)
    def build_from_local_values(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        with local_values(self.distribute_strategy):
            return build(self, iterator=iterator, data_batch=data_batch)

    trainer.TensorFlowTrainer._maybe_symbolic_build = build_from_local_values
