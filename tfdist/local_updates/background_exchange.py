"""Exchanges of fragments that are sent while the next steps run: a thread, and queues between it and the steps."""

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction

# Steps use TensorFlow's queues, whose operations wait without a thread, in any function and loop.


class BackgroundExchange:
    """Sums the differences of fragments over the workers, in the order in which steps hand them over."""

    def __init__(
        self,
        specs: Sequence[tuple[Sequence[tf.TensorShape], Sequence[str]]],
        reduction: ReplicaReduction,
        device: str,
        timeout_seconds: float,
        late_workers: Callable[[int], str],
    ) -> None:
        """Starts the thread. Call this eagerly, on all workers in the same order.

        The `specs` are the shapes and the unique paths of the variables of each fragment. The `reduction` sums between
        the workers, in a group that steps do not use; `device` is that of this worker that sends. See
        `ExchangeProgress` for `late_workers`, which is called when an exchange starts, and when it has taken longer
        than `timeout_seconds`.
        """
        self._timeout_seconds, self._late_workers = timeout_seconds, late_workers
        self._reduction = reduction  # the functions below do not keep it, and its exchanges end with it
        self._started = 0
        host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
        with tf.device(host):
            self._order = tf.queue.FIFOQueue(len(specs) + 1, [tf.int32], [[]])
            self._given, self._sums = [], []
            for shapes, _ in specs:
                values = [tf.float32] * len(shapes)
                self._given.append(tf.queue.FIFOQueue(1, [tf.float32, *values], [[], *shapes]))
                # Room for an error, too.
                self._sums.append(tf.queue.FIFOQueue(3, [tf.string, *values], [[], *shapes]))
        self._shapes = [list(shapes) for shapes, _ in specs]
        self._exchanges = [self._traced(number, reduction, paths, device) for number, (_, paths) in enumerate(specs)]
        # The thread does not keep this object alive.
        order, reference = self._order, weakref.ref(self)
        threading.Thread(target=_serve, args=(order, reference), daemon=True, name="tfdist exchanges weights").start()
        weakref.finalize(self, _close, order)
        atexit.register(_close, order)

    def send(self, number: int, samples: tf.Tensor, differences: Sequence[tf.Tensor]) -> None:
        """Hands over a fragment's differences, and the samples of this worker by which they count."""
        enqueued = self._given[number].enqueue([samples, *differences])
        with tf.control_dependencies([enqueued] if enqueued is not None else []):
            self._order.enqueue(number)

    def receive(self, number: int) -> list[tf.Tensor]:
        """Waits for the sums of a fragment that was handed over; fails if its exchange has."""
        error, *sums = self._sums[number].dequeue()
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(error, ""), [error])]):
            return [tf.identity(value) for value in sums]

    def clear(self) -> None:
        """Discards sums that were not received. Call this eagerly, while no exchange is under way."""
        for sums in self._sums:
            while int(sums.size()):
                sums.dequeue()

    def give_back(self, number: int, sums: Sequence[Any]) -> None:
        """Makes the next `receive` return `sums`, which an earlier one has returned."""
        self._sums[number].enqueue(["", *[tf.convert_to_tensor(value) for value in sums]])

    def _traced(self, number: int, reduction: ReplicaReduction, paths: Sequence[str], device: str) -> Any:
        difference_queue = self._given[number]

        def exchange() -> list[tf.Tensor]:
            samples, *differences = difference_queue.dequeue()
            with tf.device(device):
                share = reduction.share_of_worker(samples)
                return reduction.sum_of_workers([difference * share for difference in differences], paths)

        return tf.function(exchange, autograph=False).get_concrete_function()

    def exchange(self, number: int) -> None:
        """Exchanges a fragment that was handed over. Called by the thread."""
        exchange, self._started = self._started, self._started + 1
        self._late_workers(exchange)
        timer = threading.Timer(self._timeout_seconds, self._report_late, [number, exchange])
        timer.daemon = True
        timer.start()
        try:
            self._sums[number].enqueue(["", *self._exchanges[number]()])
        except Exception as error:  # the step that needs the sums raises it
            self._fail(
                number,
                f"The exchange of weights has failed. Received: {error}. Expected: no error of another worker or the "
                "network. Restart the workers from a checkpoint (`tfdist run --max-restarts`).",
            )
        finally:
            timer.cancel()

    def _report_late(self, number: int, exchange: int) -> None:
        late = self._late_workers(exchange)
        self._fail(
            number,
            f"An exchange of weights has taken longer than {self._timeout_seconds:g} s. Received: nothing from "
            f"{late or 'a worker that has started it'}. Expected: the differences of all workers. Restart the workers "
            "from a checkpoint (`tfdist run --max-restarts`), or raise `timeout_seconds` of DiLoCo for a slow link.",
        )

    def _fail(self, number: int, message: str) -> None:
        zeros = [tf.zeros(shape) for shape in self._shapes[number]]
        self._sums[number].enqueue([message, *zeros])


def _serve(order: Any, reference: "weakref.ref[BackgroundExchange]") -> None:
    while True:
        try:
            number = int(order.dequeue())
        except tf.errors.OpError:  # closed
            return
        exchange = reference()
        if exchange is None:
            return
        exchange.exchange(number)
        del exchange


def _close(order: Any) -> None:
    order.close(cancel_pending_enqueues=True)
