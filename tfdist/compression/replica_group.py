"""`Group`: the replicas that take part in a reduction, as seen by one of them."""

from abc import ABC, abstractmethod

import tensorflow as tf


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
        """Returns the sum of the replicas' `tensor`. A replica of N sends `2 (N - 1) / N` times its size."""

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
