"""Datasets that each worker creates for itself."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.keras_symbols import DataAdapter


class WorkerIterator:
    """Stands for the workers' iterators where `fit` expects an iterator of the chief."""

    def __init__(self, dataset: "WorkerDatasets") -> None:
        """Creates an iterator over `dataset`."""
        self.dataset = dataset

    @property
    def on_workers(self) -> Any:
        """The workers' iterators; a new epoch continues where the previous one ended."""
        return self.dataset.iterators

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> Any:
        raise ValueError(
            "Datasets that are created on the workers can only be used for training. Received: such a dataset for "
            "`evaluate` or `validation_data`. Expected: data of the chief, which yield each sample once: arrays, a "
            "tf.data.Dataset or a PyDataset."
        )


class WorkerDatasets(DataAdapter, tf.distribute.DistributedDataset):
    """A dataset on each worker, created there by the same function; no sample passes through the chief.

    It is its own Keras data adapter. `coordinator.create_per_worker_dataset` takes it, too.
    """

    is_drawn_by_workers = True  # it has no position on the chief, and no end

    def __init__(self, dataset_fn: Callable[..., tf.data.Dataset], coordinator: Any) -> None:
        """Has each worker call `dataset_fn`.

        Args:
            dataset_fn: Takes a `tf.distribute.InputContext`; returns a dataset of batches.
            coordinator: Of the strategy.

        Raises:
            ValueError: `dataset_fn` does not return a dataset.
        """

        def create() -> tf.data.Dataset:
            return dataset_fn(tf.distribute.InputContext(1, 0, 1))

        with tf.device("/job:chief/device:CPU:0"):
            # Once on the chief: workers create it in a function, in which its cardinality is unknown.
            dataset = create()
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                f"`dataset_fn` does not return a dataset. Received: {type(dataset).__name__}. Expected: a "
                "tf.data.Dataset of batches."
            )
        self._spec = dataset.element_spec
        self._cardinality = int(dataset.cardinality())
        self.dataset_fn = create
        self._coordinator = coordinator
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
        """Unknown."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Of a worker's batches."""
        return tf.nest.flatten(self._spec)[0].shape[0]

    def get_tf_dataset(self) -> "WorkerDatasets":
        """What the epoch iterator draws from.

        Raises:
            ValueError: The dataset is finite.
        """
        if self._cardinality != tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"A worker's dataset is finite. Received: cardinality {self._cardinality}. Expected: an infinite one, "
                "as it is not known which worker trains on how many of its batches. End it with `.repeat()` and give "
                "`fit` a `steps_per_epoch`."
            )
        return self

    @property
    def iterators(self) -> Any:
        """One iterator on each worker."""
        if self._iterators is None:
            self._iterators = iter(self._coordinator.create_per_worker_dataset(self.dataset_fn))
        return self._iterators

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)
