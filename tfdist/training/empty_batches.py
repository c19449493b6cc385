"""Replicas without samples: the end of the data, or a last batch smaller than the number of replicas.

Such a replica must take part in the collectives of its step. Many operations cannot compute with no samples (with
oneDNN, TensorFlow 2.21's `Conv2D` returns a wrong shape), so that it computes with one sample of zeros instead, and
nothing of that is kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.training.step import count_samples


def filled(data: Any, samples: Any) -> Any:
    """Returns `data`, or one sample of zeros in its place.

    Args:
      data: a structure of tensors. Ragged and sparse ones stay as they are.
      samples: how many samples there are, an int or an int32 scalar.
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
def kept_if(contributes: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Takes back what is assigned to `variables` of this replica unless it `contributes`."""
    if contributes is True:
        yield
        return
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(contributes, tf.convert_to_tensor(variable.value), value))


def without_filling(outputs: Any, samples: Any) -> Any:
    """`outputs`, or none of their rows if they were computed of `filled` data though there were no `samples`."""

    def kept(output: Any) -> Any:
        if not (tf.is_tensor(output) and _has_samples(output)):
            return output
        return output[: tf.where(tf.greater(samples, 0), tf.shape(output)[0], 0)]

    return tf.nest.map_structure(kept, outputs)


def predict_on_replica(step_function: Any, input_of: Any) -> Any:
    """Wraps Keras' prediction of a batch so that a replica without samples predicts none.

    Args:
      step_function: predicts a replica's data.
      input_of: returns the input of a replica's data whose first dimension counts the samples.
    """

    @tf.autograph.experimental.do_not_convert
    def replica_predict(replica_data: Any) -> Any:
        value = input_of(replica_data)
        if value is None or (tf.is_tensor(value) and value.shape.rank and value.shape[0]):
            return step_function(replica_data)
        samples = count_samples(value)
        return without_filling(step_function(filled(replica_data, samples)), samples)

    return replica_predict


def _has_samples(tensor: tf.Tensor) -> bool:
    return not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)) and bool(tensor.shape.rank)


def _zeros(leaf: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
