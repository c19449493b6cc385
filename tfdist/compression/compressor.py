"""`Compressor`, the interface of all methods, `Group`, the replicas of a reduction, and `Dense`: no compression."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from tfdist.compression.gradient_tensors import all_finite, flatten, unflatten
from tfdist.compression.owned_parts import OwnedParts
from tfdist.tensorflow_internals.sent_dtypes import from_words, to_words

State = dict[str, tf.Tensor]
Payload = dict[str, tf.Tensor]


class Group(ABC):
    """The collectives over the replicas that take part in a reduction.

    Each replica has a position in the group, from 0 to `size - 1`. All replicas call the same methods in the same
    order, with tensors of equal shapes and dtypes.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of replicas that take part."""

    @abstractmethod
    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' `tensor`. A replica of N sends `2 (N - 1) / N` times its size.

        It sends `N - 1` copies of a short tensor if `sends_short_sums_at_once`.
        """

    @property
    def sends_short_sums_at_once(self) -> bool:
        """Whether `tfdist.utils.sum_copies` says how much a replica sends in a sum."""
        return False

    @property
    def may_lose_replicas(self) -> bool:
        """Whether replicas may be lost, whose tensors are then zeros: so nothing depends on what one of them computes.

        Then there is no `exchange`.
        """
        return False

    @abstractmethod
    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the replicas' `tensor`, of rank 1 or more, along axis 0 in the order of their positions.

        A replica of N sends `N - 1` times its size.
        """

    @abstractmethod
    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `slices[i]` to the replica at position `i` (all-to-all). A replica of N sends `(N - 1) / N` of them.

        Args:
            slices: Int32 of shape `[size, length]`.

        Returns:
            The slices for this replica, in the order of their senders' positions, of the shape of `slices`; and the
            position of this replica, an int32 scalar.
        """

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the slices of `exchange` alone, for a caller that knows the positions of the replicas."""
        return self.exchange(rows)[0]

    @property
    def adds_rows(self) -> bool:
        """Whether there is `reduce_scatter`, in which values are added in the same order as by `sum`."""
        return False

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' rows at the position of this one. A replica sends `(N - 1) / N` of `rows`.

        Args:
            rows: A tensor of shape `[size, length]` and any dtype.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Reduced:
    """The result of a reduction of gradients on one replica.

    Attributes:
        sums: The sums over the replicas of the decoded gradients, equal on all replicas.
        residuals: The part of this replica's gradients that is not in the sums: over all replicas, the gradients add
            up to the sums plus the residuals. Error feedback adds the residuals to the next gradients.
        states: The new states.
        finite: Bool scalar, equal on all replicas. False if a gradient of any replica holds NaN or Inf. Then `sums`
            hold NaN or Inf, too, and the caller must discard `residuals` and `states`.
    """

    sums: list[tf.Tensor]
    residuals: list[tf.Tensor]
    states: list[State]
    finite: tf.Tensor


class Compressor(ABC):
    """Encodes gradients as smaller payloads, and sums them over a group of replicas.

    A compressor has no variables. What it keeps of a variable from step to step is a `state`, a dict of tensors of
    static shape; the caller keeps one for each variable and replica. All methods are pure functions of float32 tensors.
    They can be traced; shapes are then known.
    """

    @property
    def needs_error_feedback(self) -> bool:
        """Whether a `Policy` wraps the method in `ErrorFeedback`."""
        return False

    @property
    def encodes_rows(self) -> bool:
        """Whether `encode` and `decode` accept tensors of unknown length (the rows of a sparse gradient)."""
        return False

    def initial_state(self, shape: Sequence[int]) -> State:
        """Returns the state of a variable of `shape` before its first gradient; empty if the method needs none."""
        del shape
        return {}

    @abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the size, in bytes, of the payload that `encode` returns for a gradient of `shape`."""

    @abstractmethod
    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        """Encodes the gradient of one replica for a receiver that knows its shape.

        Args:
            gradient: Float32 of any shape.
            state: The result of `initial_state`, or the state that the last call returned.

        Returns:
            The payload and the new state.
        """

    @abstractmethod
    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        """Decodes a payload to a gradient, float32 of `shape`.

        `shape` may be an int32 tensor if the compressor `encodes_rows`.
        """

    @abstractmethod
    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        """Sums the gradients of a bucket over `group`.

        Args:
            gradients: Float32, of the same shapes on all replicas.
            group: The replicas that take part.
            states: The state of each gradient, or `None` for a gradient to send uncompressed, if possible in the same
                collectives (a bias is not worth a separate collective).

        Returns:
            The sums, residuals and new states; see `Reduced`.
        """

    def reduce_parts(
        self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None], parts: OwnedParts
    ) -> Reduced:
        """Sums gradients like `reduce`; the sums are those of the values that this replica owns by `parts`, flat.

        `finite` is about these values alone. By default the sums of all values are computed. Methods whose payloads can
        be split send each part to its owner instead.
        """
        reduced = self.reduce(gradients, group, states)
        return replace(reduced, sums=parts.own_of(reduced.sums))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


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
        sums = unflatten(group.sum(flatten(gradients)), gradients) if gradients else []
        return Reduced(sums, [tf.zeros_like(g) for g in gradients], [state or {} for state in states], all_finite(sums))

    def reduce_parts(
        self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None], parts: OwnedParts
    ) -> Reduced:
        rows, dtype = parts.rows(gradients), gradients[0].dtype
        received = from_words(group.exchange_rows(to_words(rows)), dtype, parts.size, parts.length)
        total = tf.reduce_sum(received, axis=0)
        zeros = [tf.zeros_like(gradient) for gradient in gradients]
        return Reduced(parts.split(total), zeros, [state or {} for state in states], all_finite([total]))


def num_elements(shape: Sequence[int]) -> int:
    """Returns the number of elements of a tensor of `shape`."""
    return math.prod(int(length) for length in shape)
