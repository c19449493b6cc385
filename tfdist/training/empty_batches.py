"""Replicas without samples: at the end of the data, or if the last batch is smaller than the number of replicas.

Such a replica must take part in the collectives of its step. Many operations cannot compute without samples (with
oneDNN, TensorFlow 2.21's `Conv2D` returns a wrong shape), so the replica computes with one sample of zeros, and its
results are discarded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.training.sample_shares import count_samples


def zeros_if_empty(data: Any, samples: Any) -> Any:
    """Returns `data`, or one sample of zeros if there are no samples.

    Args:
        data: A structure of tensors. Ragged and sparse tensors are returned unchanged.
        samples: The number of samples, an int or an int32 scalar.
    """
    leaves = tf.nest.flatten(data)
    dense = [position for position, leaf in enumerate(leaves) if tf.is_tensor(leaf) and _has_samples(leaf)]
    if not dense:
        return data
    present = [leaves[position] for position in dense]
    chosen = tf.cond(
        tf.greater(samples, 0),
        lambda: present,
        lambda: [_zeros(leaf) for leaf in present],
    )
    for position, leaf in zip(dense, chosen, strict=True):
        leaves[position] = leaf
    return tf.nest.pack_sequence_as(data, leaves)


@contextmanager
def revert_unless(contributes: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Reverts what this replica assigns to `variables` in this context, unless it `contributes`."""
    if contributes is True:
        yield
        return
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(contributes, tf.convert_to_tensor(variable.value), value))


def drop_rows_if_empty(outputs: Any, samples: Any) -> Any:
    """Returns `outputs`, or none of their rows if there are no samples and `zeros_if_empty` has replaced the data."""

    def kept(output: Any) -> Any:
        if not (tf.is_tensor(output) and _has_samples(output)):
            return output
        return output[: tf.where(tf.greater(samples, 0), tf.shape(output)[0], 0)]

    return tf.nest.map_structure(kept, outputs)


def predict_on_replica(step_function: Any, input_of: Any) -> Any:
    """Wraps Keras' prediction of a batch so that a replica without samples returns no rows.

    Args:
        step_function: Predicts a replica's data.
        input_of: Returns the input, in a replica's data, whose first dimension is the number of samples.
    """

    @tf.autograph.experimental.do_not_convert
    def replica_predict(replica_data: Any) -> Any:
        value = input_of(replica_data)
        if value is None or (tf.is_tensor(value) and value.shape.rank and value.shape[0]):
            return step_function(replica_data)
        samples = count_samples(value)
        return drop_rows_if_empty(step_function(zeros_if_empty(replica_data, samples)), samples)

    return replica_predict


def _has_samples(tensor: tf.Tensor) -> bool:
    return not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)) and bool(tensor.shape.rank)


def _zeros(leaf: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
