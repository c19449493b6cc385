"""The boundary between TensorFlow's graphs and the exchange with other workers.

A tensor leaves through a queue and its result returns through another one, so no thread of TensorFlow waits, in
functions, conditions and loops as well as eagerly. TensorFlow orders the operations on a queue as they were traced,
which is alike on all workers; so all workers make the same exchanges in the same order.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.exchange.channel import aligned_empty
from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.exchange.worker_exchange import BACKGROUND, SMALL, STEPS, Exchange
from tfdist.tensorflow_internals.sent_dtypes import AS_VALUES
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_CAPACITY = 2**20
_SMALL_BYTES = 64 * 2**10
_STALE = (
    "The exchanges of this worker are out of step. Received: the result of an exchange of an earlier step, which ended "
    "with an error before it took the result. Expected: a process in which no step has failed. Start a new one; with "
    "the callback FailureRecovery the training resumes."
)
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")


class ExchangeBoundary:
    """Exchanges tensors with the same device of the other workers.

    Args:
        exchange: With the other workers.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._background, self._backgrounds = _Background(exchange), 0
        self._lanes: dict[str | int, _Lane] = {}
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.exchange.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.exchange.size

    def all_reduce(
        self, tensor: tf.Tensor, *, in_background: int | None = None, shape_is_fixed: bool = True
    ) -> tf.Tensor:
        """Returns the sum of the workers' tensors, which have the same shape and dtype."""
        return _shaped_like(tensor, self._call("all-reduce", tensor, in_background, shape_is_fixed))

    def all_gather(
        self, tensor: tf.Tensor, *, in_background: int | None = None, shape_is_fixed: bool = True
    ) -> tf.Tensor:
        """Returns the workers' tensors one after another along the first dimension; they have the same shape."""
        gathered = self._call("all-gather", tensor, in_background, shape_is_fixed)
        shape = tf.shape(tensor)
        result = tf.reshape(gathered, tf.concat([[self.size * shape[0]], shape[1:]], axis=0))
        rows = tensor.shape[0]
        result.set_shape([None if rows is None else self.size * rows, *tensor.shape[1:]])
        return result

    def all_to_all(self, rows: tf.Tensor, *, in_background: int | None = None) -> tf.Tensor:
        """Sends row `i` to worker `i`; returns the received rows, by rank."""
        return _shaped_like(rows, self._call("all-to-all", rows, in_background))

    def reduce_scatter(self, rows: tf.Tensor, *, in_background: int | None = None) -> tf.Tensor:
        """Returns the sum of the workers' rows at the rank of this one, where `rows` is `[number of workers, ...]`."""
        return _shaped_like(rows[0], self._call("reduce-scatter", rows, in_background))

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor of worker 0."""
        return _shaped_like(tensor, self._call("broadcast", tensor))

    def new_background(self) -> int:
        """Returns the number of another sequence of exchanges beside the steps: all workers ask in the same order."""
        with self._lock:
            number, self._backgrounds = self._backgrounds, self._backgrounds + 1
        return number

    def _call(
        self, kind: str, tensor: tf.Tensor, in_background: int | None = None, shape_is_fixed: bool = True
    ) -> tf.Tensor:
        if tensor.dtype != tf.bool and tensor.dtype.name in AS_VALUES:
            wide = tf.cast(tensor, AS_VALUES[tensor.dtype.name])
            return tf.cast(self._call(kind, wide, in_background, shape_is_fixed), tensor.dtype)
        # Where a worker does not know the size, another one, which has traced with other data, may know it.
        elements = tensor.shape.num_elements() if shape_is_fixed else None
        is_large = elements is not None and elements * tensor.dtype.size > _SMALL_BYTES
        name = STEPS if is_large else SMALL
        with self._lock:
            lane = self._lanes.get(name if in_background is None else in_background)
            if lane is None:
                with tf.init_scope():
                    if in_background is None:
                        lane = self._lanes[name] = _Lane(self.exchange, name)
                        lane.serve_alone()
                    else:
                        lane = self._background.add(in_background)
                        self._lanes[in_background] = lane
        return lane.exchange(kind, tensor)


class _Background:
    """Lanes that share the channel of exchanges beside the steps, in the order that worker 0 chooses.

    Threads of a program request exchanges of different lanes in any order. So worker 0 sends the number of a lane
    before its exchange, and the others take the next request of that lane.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._channel = exchange, exchange.channel(BACKGROUND)
        self._lanes: dict[int, _Lane] = {}
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    def add(self, number: int) -> "_Lane":
        """Returns a new lane; its number is the same on all workers."""
        lane = _Lane(self._exchange, BACKGROUND)
        with self._changed:
            is_first = not self._lanes
            self._lanes[number] = lane
            self._changed.notify_all()
        if self._exchange.rank == 0:
            threading.Thread(target=self._lead, args=(number, lane), name="tfdist background", daemon=True).start()
        elif is_first:
            threading.Thread(target=self._follow, name="tfdist background", daemon=True).start()
        return lane

    def _lead(self, number: int, lane: "_Lane") -> None:
        while True:
            request = lane.next_request()
            with self._turn:
                lane.answer(request, lambda: self._channel.broadcast(np.array([number])))

    def _follow(self) -> None:
        try:
            while True:
                number = int(self._channel.broadcast(np.zeros(1, np.int64))[0])
                with self._changed:
                    while number not in self._lanes:
                        self._changed.wait()
                    lane = self._lanes[number]
                lane.answer(lane.next_request())
        except Exception:  # the group has failed, which each lane's next exchange raises
            with self._changed:
                for lane in self._lanes.values():
                    lane.serve_alone()


class _Lane:
    """Two queues: requests, which a thread takes, and results, which it returns in the same order."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._channel, self._name = exchange, exchange.channel(name), name
        with tf.device("CPU:0"):
            self._requests = tf.queue.FIFOQueue(_CAPACITY, [tf.int64, tf.uint8], name=f"tfdist_{name}_requests")
            self._results = tf.queue.FIFOQueue(
                _CAPACITY, [tf.string, tf.int64, tf.uint8], name=f"tfdist_{name}_results"
            )
            self._requested = ResourceVariable(0, dtype=tf.int64, trainable=False, name=f"tfdist_{name}_exchanges")

    def serve_alone(self) -> None:
        """Starts a thread that makes the exchanges as they are requested."""
        threading.Thread(target=self._serve, name=f"tfdist exchange {self._name}", daemon=True).start()

    def exchange(self, kind: str, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the values of the result, flat."""
        with tf.device("CPU:0"):
            number = self._requested.assign_add(1, read_value=True)
            header = tf.stack([tf.constant(_KINDS.index(kind), tf.int64), tensor.dtype.as_datatype_enum, number])
            with tf.control_dependencies([self._requests.enqueue([header, _to_bytes(tensor)])]):
                error, answered, received = self._results.dequeue()
            # Assertions, because `fit` takes the error of a closed queue for the end of the data. A step that ended
            # between its request and the result leaves that result in the queue.
            checks = [
                tf.raw_ops.Assert(condition=tf.equal(error, ""), data=[error]),
                tf.raw_ops.Assert(condition=tf.equal(answered, number), data=[_STALE]),
            ]
            with tf.control_dependencies([check for check in checks if check is not None]):
                return _from_bytes(received, tensor.dtype)

    def _serve(self) -> None:
        while True:
            self.answer(self.next_request())

    def next_request(self) -> list[tf.Tensor]:
        """Waits for the next request; returns it as `answer` takes it."""
        return list(self._requests.dequeue())

    def answer(self, request: list[tf.Tensor], begin: Callable[[], Any] | None = None) -> None:
        """Makes the exchange of a request and returns its result, or the error, to the graph.

        Args:
            request: What `next_request` returned. It is emptied, so that its memory is freed.
            begin: Called before the exchange.
        """
        data, header = request.pop(), request.pop()
        kind, dtype, number = header.numpy().tolist()
        try:
            if begin is not None:
                begin()
            values = _array(data).view(tf.as_dtype(dtype).as_numpy_dtype)
            result, error = _tensor(self._made(_KINDS[kind], values)), ""
            del values
        except Exception as failure:  # raised by the step that waits for the result
            result, error = tf.zeros([0], tf.uint8), str(failure)
            if not isinstance(failure, ExchangeError):
                self._exchange.fail(f"an error of its exchange ({type(failure).__name__}: {failure})")
        del data
        self._results.enqueue([error, tf.constant(number, tf.int64), result])

    def _made(self, kind: str, values: Any) -> Any:
        if kind == "all-reduce":
            return self._channel.all_reduce(values)
        if kind == "all-gather":
            return self._channel.all_gather(values)
        if kind in ("all-to-all", "reduce-scatter"):
            rows = values.reshape(self._channel.size, -1)
            return self._channel.all_to_all(rows) if kind == "all-to-all" else self._channel.reduce_scatter(rows)
        return self._channel.broadcast(values)


def _shaped_like(tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.reshape(values, tf.shape(tensor)), tensor.shape)


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    flat = tf.reshape(tensor, [-1])
    return flat if flat.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(data, tf.bool)
    if dtype == tf.uint8:
        return data
    return tf.bitcast(data if dtype.size == 1 else tf.reshape(data, [-1, dtype.size]), dtype)


def _array(tensor: tf.Tensor) -> Any:
    """Returns the tensor's memory, which is valid as long as the tensor."""
    return np.frombuffer(memoryview(tensor), np.uint8)


def _tensor(values: Any) -> tf.Tensor:
    """Returns a tensor with the memory of the array, if it is aligned."""
    data = values.reshape(-1).view(np.uint8)
    if not data.nbytes:
        return tf.zeros([0], tf.uint8)
    if data.ctypes.data % 64:
        copy = aligned_empty(data.shape, np.uint8)
        copy[...] = data
        data = copy
    return tf.experimental.dlpack.from_dlpack(data.__dlpack__())
