"""Datasets that each worker creates for itself, and for its clients in federated averaging."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.keras_symbols import DataAdapter
from tfdist.tensorflow_internals.cluster_coordinator import create_iterators


class WorkerIterator:
    """Represents the workers' iterators where `fit` expects an iterator of the chief."""

    def __init__(self, dataset: "WorkerDatasets") -> None:
        """Creates an iterator over `dataset`; a new epoch continues where the previous one ended."""
        self.dataset = dataset

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
        """Has each worker call `dataset_fn`."""

        def create() -> tf.data.Dataset:
            return dataset_fn(tf.distribute.InputContext(1, 0, 1))

        with tf.device("/job:chief/device:CPU:0"):
            # Once on the chief: workers create it in a function, in which its cardinality is unknown.
            dataset = _checked(create())
        self._spec = dataset.element_spec
        self._cardinality = int(dataset.cardinality())
        self.dataset_fn = create
        self._coordinator = coordinator
        self._iterators: Any = None

    @property
    def element_spec(self) -> Any:
        """The types of the tensors in a worker's batches."""
        return self._spec

    @property
    def cardinality(self) -> int:
        """The number of batches, which is infinite."""
        return int(tf.data.INFINITE_CARDINALITY)

    @property
    def num_batches(self) -> None:
        """The number of batches in an epoch, which is unknown."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The number of rows of a worker's batches; `None` if it varies."""
        return tf.nest.flatten(self._spec)[0].shape[0]

    def get_tf_dataset(self) -> "WorkerDatasets":
        """Returns what the epoch iterator draws from."""
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


class ClientDatasets(WorkerDatasets):
    """A dataset for each client. No sample passes through the chief, and the chief reads none.

    A client's dataset is repeated, so that it may be finite.

    Attributes:
        clients: The number of clients.
    """

    def __init__(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], strategy: Any, clients: int
    ) -> None:
        """Traces `dataset_fn` for each client.

        The `input_pipeline_id` of the `tf.distribute.InputContext` that it takes is the number of the client.
        """
        self.clients, self._strategy = clients, strategy
        self._functions = [_traced(dataset_fn, client, clients) for client in range(clients)]
        specs = [function.structured_outputs.element_spec for function in self._functions]
        for client, spec in enumerate(specs):
            if spec != specs[0]:
                raise ValueError(
                    f"The clients' datasets differ. Received: elements {specs[0]} of client 0 and {spec} of client "
                    f"{client}. Expected: elements of one structure, dtype and shape for all clients. With a last "
                    "batch of another size, use `drop_remainder=True` for all of them, or for none."
                )
        self._spec = specs[0]
        self._cardinality = tf.data.INFINITE_CARDINALITY
        self.dataset_fn = _not_available

    def is_of(self, strategy: Any, clients: int) -> bool:
        """Whether these are data of so many clients of `strategy`."""
        return self._strategy is strategy and self.clients == clients

    @property
    def iterators(self) -> Any:
        """Raises an error: only rounds know the position of each client."""
        return _not_available()

    def create_iterators(self, positions: Any) -> list[Any]:
        """Creates all clients' iterators: client `c` has number `c // num_workers` of its worker `c % num_workers`.

        `positions`, an int64 vector, are by client the batches it has trained on, read again when a worker has
        returned.
        """
        workers = self._strategy.num_workers
        rows = range(-(-self.clients // workers))
        return [
            create_iterators(
                self._strategy.coordinator,
                [
                    (self._functions[client], functools.partial(_item, positions, client))
                    if (client := row * workers + worker) < self.clients
                    else None
                    for worker in range(workers)
                ],
                self._strategy,
            )
            for row in rows
        ]


def _checked(dataset: Any) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"`dataset_fn` does not return a dataset. Received: {type(dataset).__name__}. Expected: a "
            "tf.data.Dataset of batches."
        )
    return dataset


def _item(positions: Any, client: int) -> int:
    return int(positions[client])


def _not_available() -> Any:
    raise ValueError(
        "The data of clients can only be used by `fit`. Received: such data in a custom training loop. Expected: a "
        "dataset of a strategy in another mode."
    )


def _traced(dataset_fn: Callable[..., tf.data.Dataset], client: int, clients: int) -> Any:
    context = tf.distribute.InputContext(num_input_pipelines=clients, input_pipeline_id=client, num_replicas_in_sync=1)

    def create(position: tf.Tensor) -> tf.data.Dataset:
        return _checked(dataset_fn(context)).repeat().skip(position)

    return tf.function(create).get_concrete_function(tf.TensorSpec([], tf.int64))
