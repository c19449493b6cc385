"""The interface of all compression methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.compression.group import Group

State = dict[str, tf.Tensor]
Payload = dict[str, tf.Tensor]


@dataclass(frozen=True)
class Reduced:
    """What a reduction of some gradients returns to one replica.

    Attributes:
      sums: the sum over the replicas of what they have delivered of their gradients, equal on all of them.
      remainders: what this replica has not delivered of its own gradients: over all replicas, the gradients are the
        sums and the remainders added up. Error feedback keeps them for the next step.
      states: the methods' new states.
      finite: bool scalar, equal on all replicas: false if any replica's gradients hold NaN or Inf. Then `sums` hold
        some too, and neither `remainders` nor `states` may be kept.
    """

    sums: list[tf.Tensor]
    remainders: list[tf.Tensor]
    states: list[State]
    finite: tf.Tensor


class Compressor(ABC):
    """How gradients are made smaller before they travel, and how they are summed over a group of replicas.

    A compressor has no variables: what it must remember of a variable from step to step is a `state`, a dict of
    tensors of static shape, which the caller keeps for it, one a variable and replica. All methods are pure functions
    of tensors (float32), may be traced, and know the shapes when they are.
    """

    @property
    def needs_error_feedback(self) -> bool:
        """Whether the method is wrapped in `ErrorFeedback` where the caller does not say otherwise."""
        return False

    @property
    def encodes_rows(self) -> bool:
        """Whether `encode` and `decode` take tensors of unknown length too (the rows of a sparse gradient)."""
        return False

    def initial_state(self, shape: Sequence[int]) -> State:
        """The state of a variable of `shape` before its first gradient; empty where the method needs none."""
        del shape
        return {}

    @abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """The size of the payload of a gradient of `shape`, in bytes: that of the tensors that `encode` returns."""

    @abstractmethod
    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        """Encodes the gradient of one replica for a receiver who knows its shape.

        Args:
          gradient: float32 of any shape.
          state: of `initial_state`, or as returned by the last call.

        Returns:
          The payload and the new state.
        """

    @abstractmethod
    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        """The gradient, float32 of `shape`, that a `payload` stands for.

        `shape` may be an int32 tensor where the compressor `encodes_rows`.
        """

    @abstractmethod
    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        """Sums the gradients of a bucket over `group`.

        Args:
          gradients: float32, of the same shapes on all replicas.
          group: the replicas that take part.
          states: one a gradient: its state, or `None` for a gradient that shall travel uncompressed, in the same
            collectives where that is possible (a bias is not worth a collective of its own).

        Returns:
          The sums and what is to be remembered; see `Reduced`.
        """

    def __repr__(self) -> str:
        settings = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def elements_of(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of `shape`."""
    elements = 1
    for length in shape:
        elements *= int(length)
    return elements


def shape_of(tensor: tf.Tensor) -> "Sequence[int] | tf.Tensor":
    """The shape of `tensor` as `decode` takes it: static where it is known."""
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether no element of `tensors` is NaN or Inf, a bool scalar; one pass over the values.

    The difference of a number and itself is 0, but of NaN or Inf it is NaN, and so is a sum that holds one.
    """
    if not tensors:
        return tf.constant(True)
    probes = [tf.reduce_sum(tensor) for tensor in tensors]
    return tf.reduce_all(tf.math.is_finite(tf.stack(probes)))
