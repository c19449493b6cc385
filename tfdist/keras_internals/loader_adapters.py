"""Keras' adapters of loaders: datasets of Grain and the `DataLoader` of PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.epoch_iterator import GRAIN, TORCH, data_kind
from tfdist.private_symbols import private

_utils = private("keras.src.trainers.data_adapters:data_adapter_utils", "reads shapes and sparse parts of batches")
_adapter_of = private("keras.src.trainers.data_adapters:get_data_adapter", "reads in a custom loop what `fit` can read")


def loader_adapter(data: Any) -> Any:
    """Returns the adapter that `fit` would make for a loader; `None` for other data."""
    with suppress(ValueError):  # of an unknown type
        adapter = _adapter_of(x=data)
        return adapter if data_kind(adapter) in (GRAIN, TORCH) else None
    return None


def draw_batches_from(adapter: Any, batches: Callable[[], Iterator[Any]]) -> None:
    """Makes the datasets of a loader's adapter draw from `batches`, which yields batches as the loader does.

    Keras' own datasets make the loader's iterators where nobody can ask these for their positions.
    """
    stock = adapter.get_tf_dataset
    is_of_grain = data_kind(adapter) == GRAIN
    convert = _of_grain if is_of_grain else _of_torch

    def get_tf_dataset() -> tf.data.Dataset:
        # Both read two batches, if nobody has. Keras takes from PyTorch tuples and lists only.
        signature = stock().element_spec if is_of_grain else _spec_of_torch(adapter)
        return tf.data.Dataset.from_generator(lambda: map(convert, batches()), output_signature=signature)

    adapter.get_tf_dataset = get_tf_dataset


def _of_grain(batch: Any) -> Any:
    """Converts a batch as Keras does."""

    def to_tensor(value: Any) -> Any:
        if value is None:
            return tf.experimental.Optional.empty(None)
        if _utils.is_scipy_sparse(value):
            return _utils.scipy_sparse_to_tf_sparse(value)
        return _utils.jax_sparse_to_tf_sparse(value) if _utils.is_jax_sparse(value) else value

    return keras.tree.lists_to_tuples(keras.tree.map_structure(to_tensor, batch))


def _of_torch(batch: Any) -> Any:
    """Converts a batch as Keras does; one that is a tensor, or a dictionary, stays one."""
    arrays = keras.tree.map_structure(lambda tensor: np.asarray(tensor.cpu()), batch, none_is_leaf=False)
    return tuple(arrays) if isinstance(batch, list | tuple) else arrays


def _spec_of_torch(adapter: Any) -> Any:
    batches = list(islice(adapter.get_torch_dataloader(), _utils.NUM_BATCHES_FOR_TENSOR_SPEC))
    spec = _utils.get_tensor_spec(batches)
    return tuple(spec) if isinstance(batches[0], list | tuple) else spec
