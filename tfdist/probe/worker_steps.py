"""Times real steps of `fit` of one worker, their forward pass and update, and sees their gradients."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES, fill_buckets
from tfdist.collectives.recorded_reduction import Recorder
from tfdist.keras_internals.model_state import optimizers_of
from tfdist.keras_internals.optimizers import variables_by_path
from tfdist.planning.measurements import Collective, StepMeasurement
from tfdist.probe.first_batches import FirstBatches
from tfdist.probe.probe_strategy import ProbeStrategy
from tfdist.probe.process_usage import idle_seconds, peak_bytes, reset_peak, timed, work_seconds
from tfdist.tensorflow_internals.operation_order import after_clocks, seconds_since_1970
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_FIRST_STEPS = 2  # left out: they trace, compile and fill caches
_MIN_STEPS = 6
_MAX_STEPS = 40
_SECONDS = 1.5
_MAX_ACCUMULATED = 64
_TIMED_STEPS = 6


@dataclass(frozen=True)
class UpdateGradients:
    """The gradients of one update of an optimizer."""

    paths: tuple[str, ...]  # the paths of the variables
    gradients: tuple[Any, ...]  # dense tensors or `tf.IndexedSlices`


class SeenGradients:
    """Called in the graph of a step with its gradients, in place of their exchange.

    The first step keeps them; later ones note only the times at which buckets are complete.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._keeps = ResourceVariable(True, trainable=False)
        # By the paths of an update, because a function may be traced twice.
        self._kept: dict[tuple[str, ...], list[Any]] = {}
        self._times: dict[tuple[str, ...], list[Any]] = {}

    def __call__(self, tensors: Sequence[Any], paths: Sequence[str]) -> Sequence[Any]:
        """Notes the gradients of an update, and returns them: what uses them waits until the times are noted."""
        key = tuple(paths)
        if tf.executing_eagerly() and key in self._kept:
            return tensors
        parts = [_parts(tensor) for tensor in tensors]
        with tf.init_scope():
            kept_variables = [[_variable(part.dtype) for part in tensor_parts] for tensor_parts in parts]
        self._kept[key] = [
            (variables, isinstance(tensor, tf.IndexedSlices), tuple(tensor.shape))
            for variables, tensor in zip(kept_variables, tensors, strict=True)
        ]

        def keep() -> None:
            for variables, tensor_parts in zip(kept_variables, parts, strict=True):
                for variable, part in zip(variables, tensor_parts, strict=True):
                    variable.assign(part)

        if tf.executing_eagerly():
            keep()
            return tensors
        tf.cond(self._keeps, keep, lambda: None)
        dense = [position for position, tensor_parts in enumerate(parts) if len(tensor_parts) == 1]
        buckets = fill_buckets([parts[position][0] for position in dense], DEFAULT_BUCKET_BYTES)
        groups = [[parts[dense[position]][0] for position in bucket] for bucket in buckets]
        groups += [tensor_parts for tensor_parts in parts if len(tensor_parts) > 1]
        with tf.init_scope():
            self._times[key] = [ResourceVariable(0.0, dtype=tf.float64, trainable=False) for _ in groups]
        times = []
        for members, variable in zip(groups, self._times[key], strict=True):
            with tf.control_dependencies(members):
                times.append(seconds_since_1970())
            variable.assign(times[-1])
        return after_clocks(times, tensors)

    @property
    def is_complete(self) -> bool:
        """Whether a step has updated variables."""
        first = next(iter(self._kept.values()), None)
        return first is not None and all(_is_set(variables) for variables, *_ in first)

    def stop_keeping(self) -> None:
        """Leaves the gradients as they are from now on."""
        self._keeps.assign(False)

    def times(self) -> list[float]:
        """Returns when each bucket of the last step was complete, in seconds since 1970, in the order of buckets."""
        return [float(variable.numpy()) for times in self._times.values() for variable in times]

    def updates(self) -> list[UpdateGradients]:
        return [
            UpdateGradients(paths, tuple(_value(variables, sparse, shape) for variables, sparse, shape in entries))
            for paths, entries in self._kept.items()
        ]


@dataclass(frozen=True)
class ObservedStep:
    """What is known of a worker's step after a first look."""

    updates: Sequence[UpdateGradients]  # the gradients of its updates
    # when each timed step began and when each of its buckets was complete, in seconds since 1970
    bucket_times: Sequence[tuple[float, Sequence[float]]]
    exchanges_per_step: float  # how often they are exchanged in a step; below 1 with accumulated gradients
    other_collectives: Sequence[Collective]  # what a step exchanges beside gradients


class WorkerSteps:
    """Runs steps of a model on batches of any size as the first of several workers."""

    def __init__(self, strategy: ProbeStrategy, model: Any, fit: Callable[..., Any], data: FirstBatches) -> None:
        """Prepares the steps of `model` by Keras' method `fit` on `data`."""
        self._strategy, self._model, self._fit, self._data = strategy, model, fit, data
        model.steps_per_execution = 1

    def observe(self, members: int, rows: int) -> ObservedStep:
        """Runs a few steps on `rows` samples and returns what they exchange."""
        seen = SeenGradients()
        self._compile(False)
        reduction = self._strategy.act_as_worker_of(members)
        reduction.seen = seen
        recorder = reduction.recorder = Recorder()
        timed_steps: list[tuple[float, Sequence[float]]] = []
        began: list[float] = []

        def begin(batch: int, logs: Any = None) -> None:
            began.append(time.time())

        def end(batch: int, logs: Any = None) -> None:
            reduction.recorder = None  # the first step has traced all
            if not seen.is_complete:
                self._model.stop_training = len(began) >= _MAX_ACCUMULATED
                return
            seen.stop_keeping()
            timed_steps.append((began[-1], seen.times()))
            self._model.stop_training = len(timed_steps) > _TIMED_STEPS

        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)
        self._run_fit(rows, [callback], _MAX_ACCUMULATED + _TIMED_STEPS)
        updates = seen.updates()
        per_step = self._strategy.communication.updates / max(len(began) * len(updates), 1)
        # Without the first timed step, in which the gradients were still kept.
        complete = [
            timed_step for timed_step in timed_steps[1:] if timed_step[1] and min(timed_step[1]) > timed_step[0]
        ]
        other_collectives = [
            Collective(call.kind, call.nbytes, 0) for call in recorder.calls if isinstance(call.nbytes, int)
        ]
        return ObservedStep(updates, complete, min(per_step, 1.0) if updates else 0.0, other_collectives)

    def measure(self, members: int, rows: int, *, compiled: bool) -> StepMeasurement:
        """Returns the time of a step on `rows` samples without exchanges; forward and update are 0."""
        self._compile(compiled)
        self._strategy.act_as_worker_of(members)
        reset_peak()
        seconds = self.seconds(rows)
        # Steps with accumulated gradients update now and then, which a median would leave out.
        accumulates = any(
            getattr(optimizer, "gradient_accumulation_steps", None) for optimizer in optimizers_of(self._model)
        )
        typical = statistics.fmean(seconds) if accumulates else statistics.median(seconds)
        return StepMeasurement(rows, compiled, typical, statistics.pstdev(seconds), 0.0, 0.0, peak_bytes())

    def seconds(self, rows: int) -> list[float]:
        """Returns the times of steps on `rows` samples as the strategy traces them now."""
        ended: list[float] = []
        work: list[float] = []
        idle: list[float] = []

        def end(batch: int, logs: Any = None) -> None:
            ended.append(time.perf_counter())
            if len(ended) >= _FIRST_STEPS:
                work.append(work_seconds())
                idle.append(idle_seconds())
                spent = ended[-1] - ended[_FIRST_STEPS - 1]
                self._model.stop_training = len(work) > _MIN_STEPS and spent > _SECONDS

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        self._model.train_function = None
        self._run_fit(rows, [callback], _MAX_STEPS)
        idle_of_step = (idle[-1] - idle[0]) / max(len(work) - 1, 1)
        return [after - before + idle_of_step for before, after in itertools.pairwise(work)]

    def forward_seconds(self, members: int, rows: int) -> float | None:
        """Returns the time of the forward pass up to the loss; None if the model has no `call` that `fit` uses."""
        self._strategy.act_as_worker_of(members)
        model, strategy = self._model, self._strategy
        batch = self._data.first_rows(0, rows)

        def forward(data: Any) -> Any:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            predicted = model(x, training=True)
            return model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights, training=True)

        function = tf.function(lambda data: strategy.run(forward, args=(data,)), autograph=False)
        try:
            return timed(lambda: function(batch).numpy())
        except Exception:  # a model with its own step may have any call, or none
            return None

    def update_seconds(self, members: int, updates: Sequence[UpdateGradients]) -> float:
        """Returns the time of the optimizers' updates by these gradients."""
        self._strategy.act_as_worker_of(members)
        total = 0.0
        for update in updates:
            for optimizer in optimizers_of(self._model):
                variables = variables_by_path(self._strategy, optimizer)
                if set(update.paths) <= set(variables):
                    total += self._update_seconds(optimizer, update, [variables[path] for path in update.paths])
                    break
        return total

    def _update_seconds(self, optimizer: Any, update: UpdateGradients, variables: Sequence[Any]) -> float:
        def apply() -> None:
            # Tensors of this graph: those from outside would be inputs of its conditions more than once.
            gradients = [_identity(gradient) for gradient in update.gradients]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        def run() -> Any:
            self._strategy.run(apply)
            return tf.constant(0)

        function = tf.function(run, autograph=False)
        return timed(lambda: function().numpy())

    def _compile(self, compiled: bool) -> None:
        self._model.jit_compile = compiled
        self._model.train_function = None

    def _run_fit(self, rows: int, callbacks: Sequence[Any], steps: int) -> None:
        arguments: Mapping[str, Any] = {"epochs": 1, "verbose": 0, "shuffle": False, "steps_per_epoch": steps}
        self._fit(self._model, self._data.dataset(rows), callbacks=list(callbacks), **arguments)


def _identity(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.identity(gradient)
    shape = tf.constant(gradient.dense_shape.numpy(), gradient.dense_shape.dtype)
    return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), shape)


def _parts(tensor: Any) -> list[tf.Tensor]:
    return [tensor.values, tensor.indices] if isinstance(tensor, tf.IndexedSlices) else [tf.convert_to_tensor(tensor)]


def _variable(dtype: tf.DType) -> Any:
    # No gradient has this shape, by which `_is_set` finds out that nothing was assigned yet.
    return ResourceVariable(tf.zeros([0, 0, 0, 0, 0, 0, 0], dtype), trainable=False, shape=tf.TensorShape(None))


def _is_set(variables: Sequence[Any]) -> bool:
    return tuple(variables[0].read_value().shape) != (0,) * 7


def _value(variables: Sequence[Any], is_sparse: bool, shape: tuple[int, ...]) -> Any:
    values = [variable.read_value() for variable in variables]
    return tf.IndexedSlices(*values, tf.constant(shape, values[1].dtype)) if is_sparse else values[0]
