"""Times real steps of `fit` of one worker, and their forward pass and update."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.recorded_reduction import KeptGradients, Recorder
from tfdist.keras_internals.model_state import optimizers_of
from tfdist.keras_internals.optimizers import variables_by_path
from tfdist.planning.measurements import Collective, StepMeasurement
from tfdist.probe.first_batches import FirstBatches
from tfdist.probe.probe_strategy import ProbeStrategy
from tfdist.probe.process_usage import StepClock, peak_bytes, reset_peak, timed
from tfdist.probe.seen_gradients import SeenGradients, UpdateGradients

_FIRST_STEPS = 2  # left out: they trace, compile and fill caches
_MIN_STEPS = 6
_MAX_STEPS = 40
_SECONDS = 1.5
_MAX_ACCUMULATED = 64
_TIMED_STEPS = 6


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
        if isinstance(reduction, KeptGradients):
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
        clock = StepClock()
        ended: list[float] = []

        def end(batch: int, logs: Any = None) -> None:
            ended.append(time.perf_counter())
            if len(ended) >= _FIRST_STEPS:
                clock.end_step()
                spent = ended[-1] - ended[_FIRST_STEPS - 1]
                self._model.stop_training = clock.steps >= _MIN_STEPS and spent > _SECONDS

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        self._model.train_function = None
        self._run_fit(rows, [callback], _MAX_STEPS)
        return clock.seconds()

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
