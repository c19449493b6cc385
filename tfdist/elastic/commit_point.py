"""The place in the graph of a step before which nothing is written: there the step waits until it counts."""

import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.tensorflow_internals.operation_order import leave_unordered

_CAPACITY = 2**10


class CommitPoint:
    """Calls a Python function from graphs. No thread of TensorFlow waits for its answer, as there may be only one.

    Args:
        ask: Takes a function, and calls it once, on any thread: with an empty string, or why the step must not write.
            It neither waits for that nor raises an error.
    """

    def __init__(self, ask: Callable[[Callable[[str], None]], None]) -> None:
        self._ask = ask
        self._is_answered = threading.Event()
        self._is_answered.set()
        with tf.init_scope(), tf.device("CPU:0"):
            self._agreed = tf.constant("")
            self._answers = tf.queue.FIFOQueue(_CAPACITY, [tf.string], name="tfdist_commit_answers")

    def add(self, earlier: Sequence[tf.Operation]) -> tf.Operation:
        """Adds an operation to the graph that is being traced: it runs after the earlier ones, if the step counts."""
        with tf.control_dependencies(None), tf.device("CPU:0"):
            with tf.control_dependencies(earlier):
                request = tf.numpy_function(self._request, [], [])
            leave_unordered(request)
            with tf.control_dependencies([request]):
                refusal = self._answers.dequeue()
            check = tf.raw_ops.Assert(condition=tf.equal(refusal, ""), data=[refusal])
            leave_unordered(check)
        return check

    def settle(self) -> None:
        """Waits until all that a step has asked is answered, and drops what it has not taken: it has failed."""
        self._is_answered.wait()
        with tf.init_scope():
            for _ in range(int(self._answers.size())):
                self._answers.dequeue()

    def _request(self) -> None:
        # Of this request alone: the thread that answers one may set its event when the next step has asked already.
        is_answered = self._is_answered = threading.Event()
        self._ask(lambda refusal: self._answer(refusal, is_answered))

    def _answer(self, refusal: str, is_answered: threading.Event) -> None:
        # Often on the thread of the connections, with its lock: this waits for nothing, as the queue is never full, and
        # what follows in the graph runs on threads of TensorFlow. A short step would notice TensorFlow's wrappers.
        answer = tf.constant(refusal) if refusal else self._agreed
        tf.raw_ops.QueueEnqueueV2(handle=self._answers.queue_ref, components=[answer])
        is_answered.set()
