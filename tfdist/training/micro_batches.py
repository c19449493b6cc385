"""Micro-batches: a replica computes its part of a step as several replicas would, one after another.

Each micro-batch runs in a thread of its own and only one thread runs at a time, as TensorFlow runs the replicas of a
process. They take turns where replicas would meet: at a reduction and at an optimizer's update. What they hand over
there is added up; then the replica reduces or updates once, and each goes on. So whatever a step may hold (several
optimizers that depend on each other, masks, synchronized batch normalization), k micro-batches on M replicas compute
what k * M replicas compute.
"""

import contextlib
import contextvars
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.gradients import divided

Turn = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class _Meeting:
    """What a micro-batch hands over, and what is to be made of it."""

    name: str
    value: Any
    combine: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]
    is_shared: bool = True  # else it concerns this micro-batch alone


class _Ended(BaseException):
    """Ends a micro-batch whose step has failed elsewhere."""


class MicroBatchContext(tf.distribute.ReplicaContext):
    """The replica context of a micro-batch: its reductions are over all micro-batches of all replicas."""

    def __init__(self, replica: tf.distribute.ReplicaContext, index: int, count: int, thread: "_Thread") -> None:
        number = int(tf.get_static_value(replica.replica_id_in_sync_group))
        super().__init__(replica.strategy, number)
        self._replica, self._count, self._thread = replica, count, thread
        self.part = number * count + index

    def meet(self, name: str, value: Any, combine: Callable[[Any, Any], Any], finish: Callable[[Any], Any]) -> Any:
        """Waits for the other micro-batches of this replica; returns `finish` of what they `combine` to."""
        return self._thread.pause(_Meeting(name, value, combine, finish))

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the replica's: this micro-batch meets its like on the other replicas."""
        call = functools.partial(self._replica.merge_call, merge_fn, args, kwargs)
        return self._thread.pause(_Meeting("merge_call", None, _first, lambda _: call(), is_shared=False))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces over all micro-batches of all replicas; differentiable, as the replica's is."""
        flat = tf.nest.flatten(value)
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"

        def finish(summed: list[Any]) -> list[Any]:
            if is_mean:
                summed = [divided(tensor, self._count) for tensor in summed]
            return list(self._replica.all_reduce(reduce_op, summed, options))

        def reduced(*tensors: Any) -> list[Any]:
            return self.meet("all_reduce", list(tensors), added, finish)

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
        flat = self.meet(
            "all_gather", tf.nest.flatten(value), concatenated, lambda parts: [gather(part) for part in parts]
        )
        return tf.nest.pack_sequence_as(value, flat)


def current_micro_batch() -> MicroBatchContext | None:
    """The context of the micro-batch that runs in this thread, if any."""
    context = None if tf.distribute.in_cross_replica_context() else tf.distribute.get_replica_context()
    return context if isinstance(context, MicroBatchContext) else None


def added(total: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """The sums of two lists of dense tensors, `tf.IndexedSlices` or `None`."""
    return [_sum(a, b) for a, b in zip(total, new, strict=True)]


def run_in_turns(bodies: Sequence[Callable[[], Any]], turn: Turn) -> list[Any]:
    """Runs `bodies`, one a micro-batch of this replica, and returns what they return.

    In a function, a body does not begin to compute before the one before it has computed what it handed over at its
    first meeting: where that is the update, the activations of one are gone before the next one's are made.

    Args:
      bodies: functions without arguments that meet in the same reductions and updates in the same order.
      turn: called with the number of a body; a context in which it runs until its next meeting.

    Raises:
      RuntimeError: the bodies do not meet alike, or meet in a condition, a loop or a function of their own.
    """
    threads = [_Thread(index, len(bodies), body) for index, body in enumerate(bodies)]
    try:
        result: Any = None
        while True:
            meetings: list[_Meeting | None] = []
            combined: Any = None
            for index, thread in enumerate(threads):
                with turn(index):
                    meeting = thread.resume(result)
                    while meeting is not None and not meeting.is_shared:
                        meeting = thread.resume(meeting.finish(None))
                if meeting is not None:
                    # Added up at once, or the gradients of all would be kept.
                    combined = meeting.combine(combined, meeting.value) if meetings else meeting.value
                meetings.append(meeting)
                if index + 1 < len(threads):
                    threads[index + 1].starts_after(thread.result if meeting is None else combined)
            if all(meeting is None for meeting in meetings):
                return [thread.result for thread in threads]
            _check_alike(meetings)
            result = meetings[0].finish(combined) if meetings[0] is not None else None
    finally:
        for thread in threads:
            thread.end()


class _Thread:
    """A body that runs in a thread of its own, while the thread that made this one waits."""

    def __init__(self, index: int, count: int, body: Callable[[], Any]) -> None:
        self._replica = tf.distribute.get_replica_context()
        self._context = MicroBatchContext(self._replica, index, count, self)
        devices = self._replica.strategy.extended.worker_devices
        self._device = devices[self._context.part // count % len(devices)]
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._body = tf.autograph.experimental.do_not_convert(body)
        self._variables = contextvars.copy_context()
        self._may_run, self._has_paused = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._variables.run, args=(self._run,), daemon=True)
        # What a reduction asks the thread of a replica for; see `_merge_call_is_needed`.
        self._thread.in_eager = tf.executing_eagerly()  # type: ignore[attr-defined]
        self._after: list[tf.Tensor] = []
        self._answer: Any = None
        self._meeting: _Meeting | None = None
        self._error: BaseException | None = None
        self._is_to_end = False
        self.result: Any = None

    def starts_after(self, value: Any) -> None:
        """Makes the operations of a body that has not begun wait for the tensors in `value`; later ones do not."""
        if self._graph is not None:
            self._after = [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]

    def resume(self, answer: Any) -> _Meeting | None:
        """Lets the body run to its next meeting, of which it is given the answer to the last; None at its end."""
        self._answer = answer
        self._meeting = None
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.set()
        self._has_paused.wait()
        self._has_paused.clear()
        if self._error is not None:
            raise self._error
        return self._meeting

    def pause(self, meeting: _Meeting) -> Any:
        """Called by the body: lets the other thread run, and returns its answer."""
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            raise RuntimeError(
                "A step that is computed in micro-batches reduces or updates in a condition, a loop or a function of "
                f"its own, where its micro-batches cannot meet. Received: {meeting.name} in "
                f"{getattr(tf.compat.v1.get_default_graph(), 'name', 'another graph')!r}. Expected: reductions and "
                "updates that stand in `train_step` itself. Move them there, or make the strategy with "
                "`micro_batches=1`, which computes larger local batches instead."
            )
        self._meeting = meeting
        self._has_paused.set()
        self._may_run.wait()
        self._may_run.clear()
        if self._is_to_end:
            raise _Ended
        return self._answer

    def end(self) -> None:
        """Ends the thread where it stands."""
        if self._thread.ident is None:
            return
        self._is_to_end = True
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
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_paused.set()


def _check_alike(meetings: Sequence[_Meeting | None]) -> None:
    names = ["its end" if meeting is None else meeting.name for meeting in meetings]
    if len(set(names)) > 1:
        raise RuntimeError(
            "The micro-batches of a step do not meet alike, so that they cannot be computed one after another. "
            f"Received: {', '.join(names)}. Expected: as many reductions and updates, in the same order, for every "
            "batch. Make the strategy with `micro_batches=1`, which computes larger local batches instead."
        )


def _sum(total: Any, new: Any) -> Any:
    if total is None or new is None:
        return new if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(new, tf.IndexedSlices):
        # An index may stand twice: whoever squares or clips adds its rows up first.
        values = tf.concat([total.values, new.values], axis=0)
        return tf.IndexedSlices(values, tf.concat([total.indices, new.indices], axis=0), total.dense_shape)
    return operator.add(tf.convert_to_tensor(total), tf.convert_to_tensor(new))


def _first(total: Any, _: Any) -> Any:
    return total
