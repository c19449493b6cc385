"""Keras' data adapters: the kind of data that `fit` was given, and how it is shuffled and read."""

from collections.abc import Callable
from typing import Any

from tfdist.private_symbols import private

_ADAPTERS = "keras.src.trainers.data_adapters"
ARRAYS, DATASET, PY_DATASET, GENERATOR = "arrays", "tf.data.Dataset", "keras.utils.PyDataset", "generator"
_KINDS = {
    private(f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter", "shuffles without a generator that can be saved"): (
        ARRAYS
    ),
    private(f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter", "holds the dataset that was given to `fit`"): DATASET,
    private(f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter", "shuffles in a thread, with `random`"): PY_DATASET,
    private(f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter", "can be read only once"): GENERATOR,
}


def data_kind(adapter: Any) -> str:
    """Returns the kind of data behind an adapter: a constant of this module, or else the adapter's class name."""
    return _KINDS.get(type(adapter), type(adapter).__name__)


def shuffle_argument(adapter: Any) -> Any:
    """Returns the `shuffle` that `fit` was given, for an adapter of arrays."""
    return adapter._shuffle


def wrap_py_dataset(adapter: Any, wrap: Callable[[Any, bool], Any]) -> Any:
    """Replaces an adapter's PyDataset by `wrap(py_dataset, shuffle)`, which shuffles itself, and returns it."""
    wrapper = wrap(adapter.py_dataset, adapter.shuffle)
    adapter.py_dataset, adapter.shuffle = wrapper, False
    return wrapper


def has_workers(adapter: Any) -> bool:
    """Whether threads or processes read the batches of an adapter's PyDataset."""
    return adapter.enqueuer is not None


def discard_read_ahead(adapter: Any) -> None:
    """Discards the batches that the workers of an adapter's PyDataset have read ahead.

    A pass that ended early, as to build the model, leaves batches in the queue, and maybe a thread that still takes
    some.
    """
    if has_workers(adapter):
        data = adapter.py_dataset
        adapter.enqueuer = type(adapter.enqueuer)(data, data.workers, data.use_multiprocessing, data.max_queue_size)
