"""A group: the replicas that take part in a reduction, as one of them sees it."""

from abc import ABC, abstractmethod

import tensorflow as tf


class Group(ABC):
    """What a reduction needs of the replicas it runs over.

    Every replica has a position in the group, from 0 to `size - 1`. All replicas call the same methods in the same
    order, with tensors of one shape and dtype.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """How many replicas take part."""

    @abstractmethod
    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' `tensor`. A replica of N sends `2 (N - 1) / N` times its size."""

    @abstractmethod
    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The replicas' `tensor`, of rank 1 or more, concatenated along axis 0 in the order of their positions.

        A replica of N sends `N - 1` times its size.
        """

    @abstractmethod
    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `slices[i]` to the replica at position `i` (all-to-all). A replica of N sends `(N - 1) / N` of them.

        Args:
          slices: int32 of shape `[size, length]`.

        Returns:
          What the replicas have sent to this one, of the shape of `slices`, in the order of their positions, and the
          position of this replica, an int32 scalar.
        """
