"""Where a part stands in what is trained on at once: told to its worker in one tensor, as each is sent by itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a part stands.

    >>> place = Place.unpacked(Place(3, 1, 64, [40.0]).packed())
    >>> int(place.number), int(place.slot), int(place.whole), [float(divisor) for divisor in place.divisors]
    (3, 1, 64, [40.0])

    Attributes:
      number: of the step in this training; an int64 scalar where it is unpacked.
      slot: where the part is written to in a round; an int32 scalar.
      whole: how many samples all parts of the push have together; of data sets of workers, which the chief does not
        know, how many parts there are. An int64 scalar.
      divisors: of the means of losses that have a divisor of their own, over all parts; float64 scalars.
    """

    number: Any
    slot: Any
    whole: Any
    divisors: Sequence[Any] = ()

    def packed(self) -> tf.Tensor:
        """One int64 tensor."""
        divisors = np.asarray(self.divisors, np.float64).view(np.int64)
        return tf.constant([self.number, self.slot, self.whole, *divisors], tf.int64)

    @staticmethod
    def unpacked(tensor: tf.Tensor) -> "Place":
        """What was packed."""
        divisors = tf.unstack(tf.bitcast(tensor[3:], tf.float64))
        return Place(tensor[0], tf.cast(tensor[1], tf.int32), tensor[2], divisors)
