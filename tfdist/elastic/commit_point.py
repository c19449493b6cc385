"""The place in the graph of a step before which nothing is written: there the step waits until it counts."""

import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.tensorflow_internals.operation_order import leave_unordered
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_CAPACITY = 2**10
_STALE = "Or an earlier step has failed after it had asked whether it counts: start a new process after that."


class CommitPoint:
    """Calls a Python function from graphs. No thread of TensorFlow waits for it, as there may be only one.

    Args:
        commit: Returns an empty string, or why the step must not write. It does not raise an error.
    """

    def __init__(self, commit: Callable[[], str]) -> None:
        self._commit = commit
        with tf.init_scope(), tf.device("CPU:0"):
            self._requested = ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfdist_commits")
            self._requests = tf.queue.FIFOQueue(_CAPACITY, [tf.int64], name="tfdist_commit_requests")
            self._answers = tf.queue.FIFOQueue(_CAPACITY, [tf.int64, tf.string], name="tfdist_commit_answers")
        threading.Thread(target=self._serve, name="tfdist commit", daemon=True).start()

    def add(self, earlier: Sequence[tf.Operation]) -> tf.Operation:
        """Adds an operation to the graph that is being traced: it runs after the earlier ones, if the step counts."""
        with tf.control_dependencies(None), tf.device("CPU:0"):
            with tf.control_dependencies(earlier):
                number = self._requested.assign_add(1, read_value=True)
                request = self._requests.enqueue(number)
            with tf.control_dependencies([request]):
                answered, refusal = self._answers.dequeue()
            # A step that has ended before it took its answer leaves it to the next one.
            counts = tf.logical_and(tf.equal(answered, number), tf.equal(refusal, ""))
            check = tf.raw_ops.Assert(condition=counts, data=[refusal, _STALE])
            leave_unordered(check)
        return check

    def _serve(self) -> None:
        requests, answers = self._requests, self._answers
        while True:
            (number,) = tf.raw_ops.QueueDequeueV2(handle=requests.queue_ref, component_types=requests.dtypes)
            tf.raw_ops.QueueEnqueueV2(handle=answers.queue_ref, components=[number, tf.constant(self._commit())])
