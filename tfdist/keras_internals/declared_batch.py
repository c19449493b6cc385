"""The batches that a data set declares, as symbolic tensors to build a model from."""

from typing import Any

import keras
import tensorflow as tf


def declared_batch(element_spec: Any) -> Any:
    """A replica's batch as symbolic tensors.

    Args:
      element_spec: the structure of `tf.TypeSpec`s of the batches, of a `tf.data.Dataset` or of a distributed one.

    Raises:
      AttributeError, TypeError, ValueError: the rank of a part is not known.

    >>> declared_batch(tf.TensorSpec([None, 3]))
    <KerasTensor shape=(None, 3), dtype=float32, sparse=False, ragged=False, name=...>
    """

    def symbolic(spec: Any) -> Any:
        spec = getattr(spec, "_value_specs", [spec])[0]  # of the first replica
        if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
            return None  # how a data set says that there are no targets or weights
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    return tf.nest.map_structure(symbolic, element_spec)
