"""A group: the replicas that take part in a collective, as one of them sees it."""

from abc import ABC, abstractmethod
from typing import Any

import tensorflow as tf

from tfdist.collectives.traffic import OTHER, Traffic
from tfdist.tensorflow_internals.launcher import ReplicaLauncher


class Group(ABC):
    """What a reduction needs of the replicas it runs over."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many replicas take part."""

    @abstractmethod
    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' `tensor`, which has one shape and dtype everywhere."""

    @abstractmethod
    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The replicas' `tensor`, of one shape everywhere and rank 1 or more, concatenated along axis 0."""


class CollectiveGroup(Group):
    """A group over TensorFlow's collectives; it counts what it sends."""

    def __init__(self, launcher: ReplicaLauncher, traffic: Traffic, kind: str = OTHER, options: Any = None) -> None:
        self._launcher = launcher
        self._traffic = traffic
        self._kind = kind
        self._options = options

    @property
    def size(self) -> int:
        return self._launcher.size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(tensor)
        self._traffic.add(self._kind, tensor)
        return self._launcher.all_reduce(tensor, None, self._options)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(tensor)
        self._traffic.add(self._kind, tensor)
        return self._launcher.gather(tensor, self._options)
