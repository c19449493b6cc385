"""Data sets that each worker makes for itself."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


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
        raise RuntimeError("only workers draw from a data set that they have made")


class WorkerDatasets(tf.distribute.DistributedDataset):
    """A data set on each worker, made there by the same function; no sample passes the chief."""

    def __init__(self, dataset_fn: Callable[..., tf.data.Dataset], coordinator: Any) -> None:
        """Has each worker call `dataset_fn`.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext`; returns an infinite data set of batches.
          coordinator: of the strategy.

        Raises:
          ValueError: the data set ends.
        """
        self._specs: list[Any] = []

        def made() -> tf.data.Dataset:
            dataset = dataset_fn(tf.distribute.InputContext(1, 0, 1))
            if not isinstance(dataset, tf.data.Dataset):
                raise ValueError(
                    f"The function makes no data set. Received: {type(dataset).__name__}. Expected: a tf.data.Dataset "
                    "of batches."
                )
            if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
                raise ValueError(
                    f"The data set of a worker ends. Received: cardinality {int(dataset.cardinality())}. Expected: an "
                    "infinite one, as it is not known which worker trains how many of its batches. End it with "
                    "`.repeat()` and give `fit` a `steps_per_epoch`."
                )
            return dataset

        with tf.device("/job:chief/device:CPU:0"):
            self._spec = made().element_spec
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
    def iterators(self) -> Any:
        """One iterator a worker."""
        if self._iterators is None:
            self._iterators = iter(self._per_worker)
        return self._iterators

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)
