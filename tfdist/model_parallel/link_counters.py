"""Counters of the bytes that devices send to each other, in the memory of the process that calls `fit`."""

from collections import defaultdict
from collections.abc import Mapping

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

UPDATES = "updates"
_Key = tuple[str, str, str, str]


class LinkCounters:
    """Counts executions of traced steps, so that loops over steps and repeated steps are exact.

    A step adds one small vector to one variable, beside the work of the stages.
    """

    def __init__(self, chief: str) -> None:
        """Creates the counters on the device `chief`."""
        self._chief = chief
        self._counters: dict[tuple[_Key, ...], tf.Variable] = {}

    def add(
        self, step: str, sent: Mapping[tuple[str, str, str], "int | tf.Tensor"], updates: "int | tf.Tensor" = 0
    ) -> None:
        """Counts one step. Call this while it is traced.

        Args:
            step: "train_step", "test_step" or "predict_step".
            sent: Bytes by source, target and kind; ints or int64 scalars.
            updates: 1 if the step updates the weights, otherwise 0; an int or an int64 scalar.
        """
        numbers = {(step, *key): number for key, number in sent.items()} | {(step, "", "", UPDATES): updates}
        keys = tuple(numbers)
        with tf.device(self._chief):
            if keys not in self._counters:
                with tf.init_scope():
                    zeros = tf.zeros([len(keys)], tf.int64)
                    self._counters[keys] = ResourceVariable(zeros, trainable=False, name="link_counters")
            values = list(numbers.values())
            if all(isinstance(value, int) for value in values):
                added = tf.constant(values, tf.int64)  # one operation
            else:
                added = tf.stack([tf.cast(value, tf.int64) for value in values])
            self._counters[keys].assign_add(added)

    def count(self, step: str | None = None) -> dict[tuple[str, str], dict[str, int]]:
        """Returns what was counted so far by source and target, and by kind. Call this eagerly.

        Updates are under `("", "")`.

        Args:
            step: The kind of steps; None for all.
        """
        totals: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for keys, counter in self._counters.items():
            for (of_step, source, target, kind), number in zip(keys, counter.numpy().tolist(), strict=True):
                if step in (None, of_step):
                    totals[source, target][kind] += number
        return {link: dict(by_kind) for link, by_kind in totals.items()}
