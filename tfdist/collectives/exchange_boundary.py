"""The boundary between TensorFlow's graphs and the exchange with other workers.

A tensor leaves through a queue and its result returns through another one, so no thread of TensorFlow waits, in
functions, conditions and loops as well as eagerly. TensorFlow orders the operations on a variable as they were traced,
which is alike on all workers; so all workers make the same exchanges in the same order, by which they are numbered.
"""

import collections
import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.exchange.worker_exchange import BACKGROUND, SMALL, STEPS, Exchange
from tfdist.tensorflow_internals.late_writes import check_before_writes
from tfdist.tensorflow_internals.operation_order import leave_unordered
from tfdist.tensorflow_internals.runtime import reject_graphs_of_tensorflow_1
from tfdist.tensorflow_internals.sent_dtypes import AS_VALUES
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_CAPACITY = 2**20
_SMALL_BYTES = 64 * 2**10  # Shorter tensors, as counts and metrics, do not wait behind gradients.
# The longest time for which Python code of the user keeps the interpreter, which an exchange needs several times.
_SWITCH_SECONDS = 1e-4
_LONGEST_SECONDS = 1e9
_STALE = (
    "The exchanges of this worker are out of step. Received: the result of an exchange of an earlier step, which ended "
    "with an error before it took the result. Expected: a process in which no step has failed. Start a new one; with "
    "the callback FailureRecovery the training resumes."
)
_FLUSH = -1  # in place of what is exchanged: a request without a result
_DTYPES = 2**10  # more than the numbers of dtypes
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")


class ExchangeBoundary:
    """Exchanges tensors with the same device of the other workers.

    Python's threads take turns more often in a process with a boundary (`sys.setswitchinterval`).

    Attributes:
        exchange: The exchange with the other workers.
        rank: The rank of this worker.
        size: The number of workers; the largest, if it may grow.
        beginning: How many of them begin, those of the lowest ranks.
    """

    def __init__(self, exchange: Exchange, *, beginning: int | None = None) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self.exchange, self.rank, self.size = exchange, exchange.rank, exchange.size
        self.beginning = self.size if beginning is None else beginning
        self.run_alone: Callable[[Callable[[], tf.Tensor]], tf.Tensor] | None = (
            None  # an exchange outside of a function
        )
        self._background, self._backgrounds = _Background(exchange), 0
        self._lanes: dict[str | int, _Lane] = {}
        self._requested: Any = None  # the number of exchanges, on all lanes but those in the background
        self._ended_backgrounds: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()

    def all_reduce(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        """Returns the sum of the workers' tensors, which have the same shape and dtype.

        For the `options` of all exchanges see `_call`.
        """
        return self._call("all-reduce", tensor, tensor.shape, **options)

    def all_gather(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        """Returns the workers' tensors one after another along the first dimension; they have the same shape."""
        rows = tensor.shape[:1].num_elements()
        shape = [None if rows is None else self.size * rows, *tensor.shape[1:]]
        return self._call("all-gather", tensor, shape, **options)

    def all_to_all(self, rows: tf.Tensor, **options: Any) -> tf.Tensor:
        """Sends row `i` to worker `i`; returns the received rows, by rank."""
        return self._call("all-to-all", rows, rows.shape, **options)

    def reduce_scatter(self, rows: tf.Tensor, **options: Any) -> tf.Tensor:
        """Returns the sum of the workers' rows at the rank of this one, where `rows` is `[number of workers, ...]`."""
        return self._call("reduce-scatter", rows, rows.shape[1:], **options)

    def broadcast(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        """Returns the tensor of worker 0."""
        return self._call("broadcast", tensor, tensor.shape, **options)

    def handles(self) -> list[Any]:
        """Returns the handles of which every exchange of the steps uses one."""
        with self._lock:
            return [lane.results_handle for name, lane in self._lanes.items() if isinstance(name, str)]

    def use(self, exchange: Exchange) -> None:
        """Exchanges with other workers from now on. No step may be running.

        What an interrupted step has left in the queues is dropped; exchanges are numbered from 1 again.
        """
        with self._lock:
            lanes = [lane for name, lane in self._lanes.items() if isinstance(name, str)]
            for lane in lanes:
                lane.use(exchange)
            self.exchange = exchange
            if self._requested is not None:
                with tf.init_scope():
                    self._requested.assign(0)

    def new_background(self) -> int:
        """Returns the number of another sequence of exchanges beside the steps: all workers ask in the same order."""
        while self._ended_backgrounds:
            ended = self._ended_backgrounds.popleft()
            self._background.remove(ended)
            self._lanes.pop(ended, None)
        with self._lock:
            number, self._backgrounds = self._backgrounds, self._backgrounds + 1
        return number

    def end_background_with(self, owner: Any, number: int) -> None:
        """Ends a sequence of exchanges beside the steps some time after nothing refers to `owner` any more."""
        weakref.finalize(owner, self._ended_backgrounds.append, number).atexit = False

    def _call(
        self,
        kind: str,
        tensor: tf.Tensor,
        shape: Any,
        *,
        in_background: int | None = None,
        shape_is_fixed: bool = True,
        limit_seconds: float | None = None,
    ) -> tf.Tensor:
        """Returns the result.

        Args:
            kind: One of `_KINDS`, the name of a method of `Channel`.
            tensor: The tensor of this worker.
            shape: What is known of the shape of the result.
            in_background: The number of a sequence of exchanges beside the steps.
            shape_is_fixed: Whether all workers know the same of the shape when they trace the exchange. If not, a
                worker that has traced with other data may know it, and would choose another lane.
            limit_seconds: The time after which the exchange fails.
        """
        reject_graphs_of_tensorflow_1()
        if tensor.dtype == tf.string:
            raise ValueError(
                "Workers exchange numbers and truth values. Received: a tensor of strings. Expected: another dtype. "
                "Exchange numbers that stand for the strings, or their bytes, by `tf.io.decode_raw`."
            )
        is_wider = tensor.dtype != tf.bool and tensor.dtype.name in AS_VALUES
        sent = tf.cast(tensor, AS_VALUES[tensor.dtype.name]) if is_wider else tensor
        elements = sent.shape.num_elements() if shape_is_fixed else None
        is_large = elements is not None and elements * sent.dtype.size > _SMALL_BYTES
        name = STEPS if is_large else SMALL
        with self._lock:
            lane = self._lanes.get(name if in_background is None else in_background)
            if lane is None:
                with tf.init_scope():
                    if in_background is None:
                        self._requested = _counter() if self._requested is None else self._requested
                        lane = self._lanes[name] = _Lane(self.exchange, name, self._requested)
                        lane.serve_alone()
                    else:
                        lane = self._background.add(in_background)
                        self._lanes[in_background] = lane
        result = self._exchanged(lane, kind, sent, limit_seconds or 0.0)
        result = tf.cast(result, tensor.dtype) if is_wider else result
        result.set_shape(shape)
        return result

    def _exchanged(self, lane: "_Lane", kind: str, tensor: tf.Tensor, limit_seconds: float) -> tf.Tensor:
        if self.run_alone is not None and tf.executing_eagerly():
            return self.run_alone(lambda: lane.exchange(kind, tensor, limit_seconds))
        return lane.exchange(kind, tensor, limit_seconds)


class _Background:
    """Lanes that share the channel of exchanges beside the steps, in the order that worker 0 chooses.

    Threads of a program request exchanges of different lanes in any order. So worker 0 sends the number of a lane
    before its exchange, and the others take the next request of that lane.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._channel = exchange, exchange.channel(BACKGROUND)
        self._lanes: dict[int, _Lane] = {}
        self._ended: set[int] = set()  # lanes of strategies that are gone on this worker
        self._is_used = False
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    def add(self, number: int) -> "_Lane":
        """Returns a new lane; its number is the same on all workers."""
        lane = _Lane(self._exchange, BACKGROUND, _counter())
        with self._changed:
            is_first, self._is_used = not self._is_used, True
            self._lanes[number] = lane
            self._changed.notify_all()
        if is_first:
            threading.Thread(target=self._answer_after_failure, name="tfdist background", daemon=True).start()
        if self._exchange.failure is not None:
            lane.serve_alone()
        if self._exchange.rank == 0:
            threading.Thread(target=self._lead, args=(number, lane), name="tfdist background", daemon=True).start()
        elif is_first:
            threading.Thread(target=self._follow, name="tfdist background", daemon=True).start()
        return lane

    def remove(self, number: int) -> None:
        """Ends a lane for which there are no further requests; those that it has are still answered."""
        lane = self._lanes.get(number)
        if lane is None:
            return
        lane.close()
        with self._changed:
            self._ended.add(number)
            if lane.is_empty:
                del self._lanes[number]
            self._changed.notify_all()

    def _lead(self, number: int, lane: "_Lane") -> None:
        for request in lane.requests():
            with self._turn:
                lane.answer(request, lambda: self._channel.broadcast(np.array([number])))

    def _follow(self) -> None:
        with contextlib.suppress(ExchangeError):
            while True:
                lane = self._lane(int(self._channel.broadcast(np.zeros(1, np.int64))[0]))
                request = None if lane is None else next(lane.requests(), None)
                if lane is None or request is None:
                    self._exchange.fail("it has no strategy any more that exchanges in the background")
                    return
                lane.answer(request)

    def _lane(self, number: int) -> "_Lane | None":
        with self._changed:
            self._changed.wait_for(lambda: number in self._lanes or number in self._ended)
            return self._lanes.get(number)

    def _answer_after_failure(self) -> None:
        """Answers requests on all lanes, also while `_follow` waits for a request on one of them."""
        self._exchange.wait_for_failure()
        with self._changed:
            for lane in list(self._lanes.values()):
                lane.serve_alone()


class _Lane:
    """Two queues: requests, which a thread takes, and results, which it returns in the same order."""

    def __init__(self, exchange: Exchange, name: str, requested: Any) -> None:
        self._exchange, self._channel, self._name = exchange, exchange.channel(name), name
        self._idle: collections.deque[threading.Event] = collections.deque()  # waits for earlier requests
        self._requested = requested  # counts the exchanges of all lanes that share an order
        with tf.device("CPU:0"):
            # What is exchanged, the number of the exchange, and the values.
            self._requests = tf.queue.FIFOQueue(
                _CAPACITY, [tf.int64, tf.int64, tf.uint8], name=f"tfdist_{name}_requests"
            )
            # The number, or 0 after a failure; the error if that is not the expected number; and the values.
            self._results = tf.queue.FIFOQueue(
                _CAPACITY, [tf.int64, tf.string, tf.uint8], name=f"tfdist_{name}_results"
            )
            self._stale = tf.constant(_STALE)

    def serve_alone(self) -> None:
        """Starts a thread that makes the exchanges as they are requested."""
        threading.Thread(target=self._serve, name=f"tfdist exchange {self._name}", daemon=True).start()

    def exchange(self, kind: str, tensor: tf.Tensor, limit_seconds: float) -> tf.Tensor:
        """Returns the result, without a static shape."""
        with tf.device("CPU:0"):
            number = self._requested.assign_add(1, read_value=True)
            packed = tf.constant(_packed(kind, tensor.dtype, limit_seconds), tf.int64)
            with tf.control_dependencies([self._requests.enqueue([packed, number, _to_bytes(tensor)])]):
                answered, error, received = self._results.dequeue()
            # An assertion, because `fit` takes the error of a closed queue for the end of the data. A step that ended
            # between its request and the result leaves that result in the queue.
            check = tf.raw_ops.Assert(condition=tf.equal(answered, number), data=[error])
            leave_unordered(check)
            check_before_writes(check)
            with tf.control_dependencies([check] if check is not None else []):
                return _from_bytes(received, tensor.dtype)

    def use(self, exchange: Exchange) -> None:
        """Answers requests by another exchange, after all that were made before; drops their results."""
        is_idle = threading.Event()
        self._idle.append(is_idle)
        with tf.init_scope():
            self._requests.enqueue([tf.constant(_FLUSH, tf.int64), tf.constant(0, tf.int64), tf.zeros([0], tf.uint8)])
            is_idle.wait()
            if left := int(self._results.size()):
                for _ in range(left):
                    self._results.dequeue()
        self._exchange, self._channel = exchange, exchange.channel(self._name)

    def close(self) -> None:
        """Ends the threads that wait for requests."""
        with tf.init_scope():
            self._requests.close()

    @property
    def results_handle(self) -> Any:
        """The handle of the queue of results."""
        return self._results.queue_ref

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        with tf.init_scope():
            return not int(self._requests.size())

    def _serve(self) -> None:
        for request in self.requests():
            self.answer(request)

    def requests(self) -> Iterator[list[tf.Tensor]]:
        """Waits for the requests, until `close`; yields them as `answer` takes them."""
        queue = self._requests
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                yield list(tf.raw_ops.QueueDequeueV2(handle=queue.queue_ref, component_types=queue.dtypes))

    def answer(self, request: list[tf.Tensor], begin: Callable[[], Any] | None = None) -> None:
        """Makes the exchange of a request and returns its result, or the error, to the graph.

        Args:
            request: One of `requests`. It is emptied, so that its memory is freed.
            begin: Called before the exchange.
        """
        data, number, packed = request.pop(), request.pop(), request.pop()
        if int(packed) == _FLUSH:
            self._idle.popleft().set()
            return
        error = self._stale
        try:
            if begin is not None:
                begin()
            kind, dtype, limit_seconds = _unpacked(int(packed))
            if self._name != BACKGROUND:
                self._channel.before_next(int(number), limit_seconds)
            array = np.asarray(memoryview(data))  # the tensor's memory, which is valid as long as the tensor
            result = _tensor(self._made(array, kind, dtype))
            del array
        except Exception as failure:  # raised by the step that waits for the result
            number, error, result = tf.constant(0, tf.int64), tf.constant(str(failure)), tf.zeros([0], tf.uint8)
            if not isinstance(failure, ExchangeError):
                self._exchange.fail(f"an error of its exchange ({type(failure).__name__}: {failure})")
        del data
        # Wrappers of TensorFlow would cost more than the exchange of a short tensor.
        tf.raw_ops.QueueEnqueueV2(handle=self._results.queue_ref, components=[number, error, result])

    def _made(self, data: Any, kind: str, dtype: Any) -> Any:
        """Exchanges values of a dtype, as bytes `[..., bytes of the dtype]`; returns the bytes of the result."""
        channel, shape = self._channel, data.shape
        values = data.reshape(-1).view(dtype)
        values = values.reshape(_shape_of_values(shape, values.size))
        result = getattr(channel, kind.replace("-", "_"))(values)
        if kind == "all-gather":
            shape = (channel.size * shape[0], *shape[1:])
        elif kind == "reduce-scatter":
            shape = shape[1:]
        return result.reshape(-1).view(np.uint8).reshape(shape)


def _shape_of_values(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the shape of values from that of their bytes: `[..., 2, 2]` where TensorFlow joins casts of bits."""
    ends = range(len(shape), -1, -1)
    return next((shape[:end] for end in ends if math.prod(shape[:end]) == count), (count,))


def _packed(kind: str, dtype: tf.DType, limit_seconds: float) -> int:
    limit = math.ceil(min(max(limit_seconds, 0.0), _LONGEST_SECONDS) * 1000)
    return _KINDS.index(kind) + len(_KINDS) * (dtype.as_datatype_enum + _DTYPES * limit)


@functools.cache
def _unpacked(packed: int) -> tuple[str, Any, float]:
    packed, kind = divmod(packed, len(_KINDS))
    limit, dtype = divmod(packed, _DTYPES)
    return _KINDS[kind], tf.as_dtype(dtype).as_numpy_dtype, limit / 1000


def _counter() -> Any:
    with tf.device("CPU:0"):
        return ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfdist_exchanges")


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    return tensor if tensor.dtype == tf.uint8 else tf.bitcast(tensor, tf.uint8)


def _from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(data, tf.bool)
    # An operation in any case: it waits for the check.
    return tf.identity(data) if dtype == tf.uint8 else tf.bitcast(data, dtype)


def _tensor(data: Any) -> tf.Tensor:
    """Returns a tensor with the memory of the array, which results of a channel have aligned."""
    return tf.experimental.dlpack.from_dlpack(data.__dlpack__()) if data.nbytes else tf.zeros(data.shape, tf.uint8)
