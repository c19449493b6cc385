"""Epoch iterators: all workers make the same number of steps, and a batch of data never crosses the network."""

import functools
from collections.abc import Callable
from typing import Any

from tfdist.keras_internals.declared_batch import declared_batch
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

        _num_batches: int | None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._num_batches = agree(self._distribute_strategy, self._num_batches)

        def reset(self) -> None:
            super().reset()
            self._num_batches = agree(self._distribute_strategy, self._num_batches)

    AgreedEpochIterator.__name__ = stock.__name__
    trainer.TFEpochIterator = AgreedEpochIterator


def install_local_build(is_ours: Callable[[Any], bool], local_values: Callable[[Any], Any]) -> None:
    """Makes Keras build models from the shapes that a data set declares.

    Keras draws a batch of data and takes its mean over all replicas only to learn its shapes. That fails for strings
    and for a first batch that is not even, sends a batch over the network, moves a seeded shuffle on, so that the
    samples come in another order than in one process, and leaves a second iterator behind that writes the same
    `Dataset.cache` as the one that is used.

    Args:
      is_ours: whether a strategy is one of tfdist's.
      local_values: called with a strategy; a context in which its `reduce` returns a local value as it is. Where the
        declared shapes are too vague to build from, a batch is drawn after all.
    """
    build = trainer.TensorFlowTrainer._maybe_symbolic_build

    @functools.wraps(build)
    def build_from_shapes(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self.distribute_strategy
        if iterator is not None:
            _refuse_endless(iterator)
        declared = _declared_batch(iterator) if iterator is not None and is_ours(strategy) else None
        if declared is not None:
            try:
                with strategy.scope():
                    return self._symbolic_build(data_batch=declared)
            except (ValueError, TypeError, RuntimeError):
                pass  # by a batch, Keras either builds or raises the error that the user should see
        with local_values(strategy):
            return build(self, iterator=iterator, data_batch=data_batch)

    trainer.TensorFlowTrainer._maybe_symbolic_build = build_from_shapes


def _refuse_endless(iterator: Any) -> None:
    if getattr(iterator.data_adapter, "is_drawn_by_workers", False) and iterator.steps_per_epoch is None:
        raise ValueError(
            "A data set that workers make for themselves has no end. Received: steps_per_epoch=None. Expected: the "
            "number of steps of an epoch. Give `fit` a `steps_per_epoch`."
        )


def _declared_batch(iterator: Any) -> Any:
    """A replica's batch as symbolic tensors, or `None` if a rank is not known."""
    try:
        return declared_batch(iterator._distributed_dataset.element_spec)
    except (AttributeError, TypeError, ValueError):
        return None
