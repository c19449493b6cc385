"""Data sets that each worker makes for itself."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.symbols import DataAdapter


class WorkerIterator:
    """What `fit` draws from: each worker draws from its own iterator instead."""

    def __init__(self, dataset: "WorkerDatasets") -> None:
        """Draws from `dataset`."""
        self._dataset = dataset

    @property
    def on_workers(self) -> Any:
        """One iterator a worker, which goes on where it was in the epoch before."""
        return self._dataset.iterators

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> Any:
        raise ValueError(
            "A data set that workers make for themselves can only be trained on. Received: such a data set for "
            "`evaluate` or `validation_data`. Expected: data that the chief draws, each sample once: arrays, a "
            "tf.data.Dataset or a PyDataset."
        )


class WorkerDatasets(DataAdapter, tf.distribute.DistributedDataset):
    """A data set on each worker, made there by the same function; no sample passes the chief.

    Keras takes it as its own adapter of data, which adapts nothing.
    """

    is_drawn_by_workers = True  # so that it has no position, and no end

    def __init__(self, dataset_fn: Callable[..., tf.data.Dataset], coordinator: Any) -> None:
        """Has each worker call `dataset_fn`.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext`; returns an infinite data set of batches.
          coordinator: of the strategy.

        Raises:
          ValueError: the data set ends.
        """

        def made() -> tf.data.Dataset:
            return dataset_fn(tf.distribute.InputContext(1, 0, 1))

        with tf.device("/job:chief/device:CPU:0"):
            # Once here: on the workers it is made in a function, in which its cardinality is not known.
            self._spec = _checked(made()).element_spec
        self._per_worker = coordinator.create_per_worker_dataset(made)
        self._iterators: Any = None

    @property
    def element_spec(self) -> Any:
        """Of a worker's batches."""
        return self._spec

    @property
    def cardinality(self) -> int:
        """Infinite."""
        return int(tf.data.INFINITE_CARDINALITY)

    @property
    def num_batches(self) -> None:
        """Not to be known."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Of a worker's batches."""
        return tf.nest.flatten(self._spec)[0].shape[0]

    def get_tf_dataset(self) -> "WorkerDatasets":
        """What the epoch iterator draws from."""
        return self

    @property
    def iterators(self) -> Any:
        """One iterator a worker."""
        if self._iterators is None:
            self._iterators = iter(self._per_worker)
        return self._iterators

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)


def _checked(dataset: Any) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"The function makes no data set. Received: {type(dataset).__name__}. Expected: a tf.data.Dataset of "
            "batches."
        )
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"The data set of a worker ends. Received: cardinality {int(dataset.cardinality())}. Expected: an infinite "
            "one, as it is not known which worker trains how many of its batches. End it with `.repeat()` and give "
            "`fit` a `steps_per_epoch`."
        )
    return dataset
