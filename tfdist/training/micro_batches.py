"""Micro-batches: a replica computes its part of a step as several replicas would, one after another.

Each micro-batch runs in a separate thread, and one thread runs at a time, as TensorFlow runs the replicas of a process.
A thread pauses where replicas synchronize: at a reduction and at an optimizer's update. The values of all micro-batches
are added up there, the replica reduces or updates once, and each thread resumes with the result. So k micro-batches on
M replicas compute what k * M replicas compute, whatever the step contains (several optimizers that depend on each
other, masks, synchronized batch normalization).
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.compression.gradient_tensors import added, divided
from tfdist.tensorflow_internals.xla_functions import CannotCompileError, is_compiling
from tfdist.training.sample_shares import tensors_in

Turn = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class _SyncPoint:
    """A value that a micro-batch passes on, and how the values of all micro-batches become one result."""

    name: str
    value: Any
    combine: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]
    is_shared: bool = True  # False: the point concerns this micro-batch alone.


class _Cancelled(BaseException):
    """Ends the thread of a micro-batch whose step has failed in another thread."""


class MicroBatchContext(tf.distribute.ReplicaContext):
    """The replica context of a micro-batch. Its reductions are over all micro-batches of all replicas."""

    def __init__(self, replica: tf.distribute.ReplicaContext, index: int, count: int, thread: "_Thread") -> None:
        number = int(tf.get_static_value(replica.replica_id_in_sync_group))
        super().__init__(replica.strategy, number)
        self._replica, self._count, self._thread = replica, count, thread
        self.part = number * count + index

    def synchronize(
        self, name: str, value: Any, combine: Callable[[Any, Any], Any], finish: Callable[[Any], Any]
    ) -> Any:
        """Waits for the other micro-batches of this replica, and returns `finish` of their combined values."""
        return self._thread.pause(_SyncPoint(name, value, combine, finish))

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `merge_fn` once for the micro-batches of this index on all replicas."""
        call = functools.partial(self._replica.merge_call, merge_fn, args, kwargs)
        return self._thread.pause(_SyncPoint("merge_call", None, _first, lambda _: call(), is_shared=False))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces over all micro-batches of all replicas. Differentiable, as in any replica context."""
        flat = tf.nest.flatten(value)
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"

        def finish(summed: list[Any]) -> list[Any]:
            if is_mean:
                summed = [divided(tensor, self._count) for tensor in summed]
            return list(self._replica.all_reduce(reduce_op, summed, options))

        def reduced(*tensors: Any) -> list[Any]:
            return self.synchronize("all_reduce", list(tensors), sum_pairwise, finish)

        if any(isinstance(tensor, tf.IndexedSlices) for tensor in flat):
            return tf.nest.pack_sequence_as(value, reduced(*flat))

        @tf.custom_gradient
        def differentiable(*tensors: Any) -> Any:
            return reduced(*tensors), lambda *upstream: self.all_reduce(reduce_op, upstream, options)

        return tf.nest.pack_sequence_as(value, differentiable(*map(tf.convert_to_tensor, flat)))

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Concatenates the values of all micro-batches of all replicas."""

        def concatenated(total: list[Any], new: list[Any]) -> list[Any]:
            return [tf.concat(pair, axis) for pair in zip(total, new, strict=True)]

        gather = functools.partial(self._replica.all_gather, axis=axis, options=options)
        flat = self.synchronize(
            "all_gather", tf.nest.flatten(value), concatenated, lambda parts: [gather(part) for part in parts]
        )
        return tf.nest.pack_sequence_as(value, flat)


def current_micro_batch() -> MicroBatchContext | None:
    """Returns the context of the micro-batch that runs in this thread, or None."""
    context = None if tf.distribute.in_cross_replica_context() else tf.distribute.get_replica_context()
    return context if isinstance(context, MicroBatchContext) else None


def sum_pairwise(total: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Returns the sums of two lists of dense tensors, `tf.IndexedSlices` or `None`."""
    return [added(*pair) for pair in zip(total, new, strict=True)]


def run_micro_batches(bodies: Sequence[Callable[[], Any]], turn: Turn) -> list[Any]:
    """Runs `bodies`, one for each micro-batch of this replica, and returns their results.

    In a graph, a body begins when the previous body has computed the values for its first synchronization. If that is
    the update, the activations of one micro-batch are freed before those of the next are computed.

    The functions make the same reductions and updates in the same order. `turn` takes the number of one, and returns a
    context in which it runs until its next synchronization.

    Raises:
        RuntimeError: The bodies synchronize in different orders, or inside a condition, a loop or a nested function.
    """
    threads = [_Thread(index, len(bodies), body) for index, body in enumerate(bodies)]
    try:
        result: Any = None
        while True:
            points: list[_SyncPoint | None] = []
            combined: Any = None
            for index, thread in enumerate(threads):
                with turn(index):
                    point = thread.resume(result)
                    while point is not None and not point.is_shared:
                        point = thread.resume(point.finish(None))
                if point is not None:
                    # Add up immediately, so that the gradients of one micro-batch at a time are in memory.
                    combined = point.combine(combined, point.value) if points else point.value
                points.append(point)
                if index + 1 < len(threads):
                    threads[index + 1].start_after(thread.result if point is None else combined)
            if all(point is None for point in points):
                return [thread.result for thread in threads]
            _check_equal(points)
            result = points[0].finish(combined) if points[0] is not None else None
    finally:
        for thread in threads:
            thread.cancel()


class _Thread:
    """A body in a separate thread. The thread that created this object waits while the body runs."""

    def __init__(self, index: int, count: int, body: Callable[[], Any]) -> None:
        self._replica = tf.distribute.get_replica_context()
        self._context = MicroBatchContext(self._replica, index, count, self)
        strategy = self._replica.strategy
        first_replica = sum(strategy.replicas_of_workers[: strategy.rank])
        self._device = strategy.extended.worker_devices[self._context.part // count - first_replica]
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._body = tf.autograph.experimental.do_not_convert(body)
        self._variables = contextvars.copy_context()
        self._may_run, self._has_paused = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._variables.run, args=(self._run,), daemon=True)
        # Reductions read this attribute of a replica's thread; see `_merge_call_is_needed`.
        self._thread.in_eager = tf.executing_eagerly()  # type: ignore[attr-defined]
        self._after: list[tf.Tensor] = []
        self._answer: Any = None
        self._point: _SyncPoint | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self.result: Any = None

    def start_after(self, value: Any) -> None:
        """Delays the operations of a body that has not begun until the tensors in `value` are computed."""
        if self._graph is not None:
            self._after = tensors_in(value)

    def resume(self, answer: Any) -> _SyncPoint | None:
        """Lets the body run with the `answer` to its last point, and returns its next point, or None at its end."""
        self._answer = answer
        self._point = None
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.set()
        self._has_paused.wait()
        self._has_paused.clear()
        if self._error is not None:
            raise self._error
        return self._point

    def pause(self, point: _SyncPoint) -> Any:
        """Lets the other thread run, and returns its answer. The body calls this."""
        if is_compiling():
            raise CannotCompileError
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            raise RuntimeError(
                "A step that is computed in micro-batches reduces or updates inside a condition, a loop or a nested "
                f"function, where its micro-batches cannot synchronize. Received: {point.name} in "
                f"{getattr(tf.compat.v1.get_default_graph(), 'name', 'another graph')!r}. Expected: reductions and "
                "updates in `train_step` itself. Move them there, or create the strategy with "
                "`micro_batches=1`, which computes larger local batches instead."
            )
        self._point = point
        self._has_paused.set()
        self._may_run.wait()
        self._may_run.clear()
        if self._is_cancelled:
            raise _Cancelled
        return self._answer

    def cancel(self) -> None:
        """Ends the thread at its present synchronization."""
        if self._thread.ident is None:
            return
        self._is_cancelled = True
        self._may_run.set()
        self._thread.join()

    def _run(self) -> None:
        self._may_run.wait()
        self._may_run.clear()
        try:
            with contextlib.ExitStack() as stack:
                if self._graph is not None:
                    stack.enter_context(self._graph.as_default())
                stack.enter_context(self._context)
                stack.enter_context(tf.device(self._device))
                stack.enter_context(tf.control_dependencies(self._after))
                self.result = self._body()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_paused.set()


def _check_equal(points: Sequence[_SyncPoint | None]) -> None:
    names = ["its end" if point is None else point.name for point in points]
    if len(set(names)) > 1:
        raise RuntimeError(
            "The micro-batches of a step reduce or update in different orders, so they cannot run one after another. "
            f"Received: {', '.join(names)}. Expected: the same reductions and updates, in the same order, for every "
            "batch. Create the strategy with `micro_batches=1`, which computes larger local batches instead."
        )


def _first(total: Any, _: Any) -> Any:
    return total
