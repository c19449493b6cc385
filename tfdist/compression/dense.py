"""No compression: the identity."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Payload, Reduced, State, num_elements
from tfdist.compression.gradient_tensors import all_finite, flatten, unflatten
from tfdist.compression.replica_group import Group


class Dense(Compressor):
    """Sends gradients uncompressed, as float32: 4 bytes for each value.

    >>> Dense().payload_bytes((3, 5))
    60
    """

    @property
    def encodes_rows(self) -> bool:
        return True

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return 4 * num_elements(shape)

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        return {"values": gradient}, state

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        return tf.reshape(payload["values"], shape)

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        sums = sum_dense(gradients, group)
        return Reduced(sums, [tf.zeros_like(g) for g in gradients], [state or {} for state in states], all_finite(sums))


def sum_dense(tensors: Sequence[tf.Tensor], group: Group) -> list[tf.Tensor]:
    """Returns the sums of `tensors` over `group`, with one all-reduce."""
    if not tensors:
        return []
    return unflatten(group.sum(flatten(tensors)), tensors)
