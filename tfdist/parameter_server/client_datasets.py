"""The datasets of the clients of federated averaging, each created on the worker of its client."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.parameter_server.worker_datasets import WorkerDatasets
from tfdist.tensorflow_internals.pinned_functions import create_iterators


class ClientDatasets(WorkerDatasets):
    """A dataset for each client. No sample passes through the chief, which does not read any either.

    A client's dataset is repeated, so that it may be finite.

    Attributes:
        clients: The number of clients.
    """

    def __init__(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], strategy: Any, clients: int
    ) -> None:
        """Traces `dataset_fn` for each client.

        Args:
            dataset_fn: Takes a `tf.distribute.InputContext`, whose `input_pipeline_id` is the number of the client and
                whose `num_input_pipelines` is that of all; returns a dataset of batches.
            strategy: The ParameterServerStrategy.
            clients: The number of clients.

        Raises:
            ValueError: `dataset_fn` does not return a dataset, or datasets whose elements differ in dtype or shape.
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
        """Not available: rounds alone know a client's position."""
        return _not_available()

    def create_iterators(self, positions: Any) -> list[Any]:
        """Creates all clients' iterators.

        Args:
            positions: int64 vector: by client, how many batches it has trained on. Read again when a worker has
                returned.

        Returns:
            One for each client of a worker: client `c` has number `c // num_workers` of its worker `c % num_workers`.
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
        dataset = dataset_fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                f"`dataset_fn` does not return a dataset. Received: {type(dataset).__name__}. Expected: a "
                "tf.data.Dataset of batches."
            )
        return dataset.repeat().skip(position)

    return tf.function(create).get_concrete_function(tf.TensorSpec([], tf.int64))
