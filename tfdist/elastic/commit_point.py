"""The place in the graph of a step before which nothing is written: there the step waits until it counts."""

import collections
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.tensorflow_internals.operation_order import leave_unordered

_CAPACITY = 2**10


class CommitPoint:
    """Calls a Python function from graphs. No thread of TensorFlow waits for it, as there may be only one.

    Args:
        commit: Returns an empty string, or why the step must not write. It does not raise an error.
    """

    def __init__(self, commit: Callable[[], str]) -> None:
        self._commit = commit
        self._settled: collections.deque[threading.Event] = collections.deque()
        with tf.init_scope(), tf.device("CPU:0"):
            # Whether a step asks. Otherwise `settle` wants to know when all earlier steps are answered.
            self._requests = tf.queue.FIFOQueue(_CAPACITY, [tf.bool], name="tfdist_commit_requests")
            self._answers = tf.queue.FIFOQueue(_CAPACITY, [tf.string], name="tfdist_commit_answers")
        threading.Thread(target=self._serve, name="tfdist commit", daemon=True).start()

    def add(self, earlier: Sequence[tf.Operation]) -> tf.Operation:
        """Adds an operation to the graph that is being traced: it runs after the earlier ones, if the step counts."""
        with tf.control_dependencies(None), tf.device("CPU:0"):
            with tf.control_dependencies(earlier):
                request = self._requests.enqueue(True)
            with tf.control_dependencies([request]):
                refusal = self._answers.dequeue()
            check = tf.raw_ops.Assert(condition=tf.equal(refusal, ""), data=[refusal])
            leave_unordered(check)
        return check

    def settle(self) -> None:
        """Waits until all that a step has asked is answered, and drops what it has not taken: it has failed."""
        is_settled = threading.Event()
        self._settled.append(is_settled)
        with tf.init_scope():
            self._requests.enqueue(False)
            is_settled.wait()
            for _ in range(int(self._answers.size())):
                self._answers.dequeue()

    def _serve(self) -> None:
        requests, answers = self._requests, self._answers
        while True:
            (asks,) = tf.raw_ops.QueueDequeueV2(handle=requests.queue_ref, component_types=requests.dtypes)
            if asks:
                tf.raw_ops.QueueEnqueueV2(handle=answers.queue_ref, components=[tf.constant(self._commit())])
            else:
                self._settled.popleft().set()
