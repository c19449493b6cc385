"""The process of a probe: runs a program up to its first `fit`, and measures the model instead of training it."""

import inspect
import io
import itertools
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.keras_internals.functional_graph import FunctionalGraph, graph_of
from tfdist.keras_internals.model_state import optimizers_of
from tfdist.pipeline.placed_models import check_model_for_stages
from tfdist.pipeline.stages import elements_of, estimated_cost, measured_costs
from tfdist.planning.measurements import (
    DENSE,
    ExchangeMeasurement,
    LayerMeasurement,
    ProgramMeasurement,
    StepMeasurement,
)
from tfdist.probe.exchange_costs import bucket_ready, measure_exchange
from tfdist.probe.first_batches import FirstBatches, first_batches
from tfdist.probe.probe_strategy import ProbeStrategy, stand_in_for_all
from tfdist.probe.process_usage import resident_bytes
from tfdist.probe.worker_steps import WorkerSteps

# What this process writes to its parent: one JSON object a line, with one of these keys.
_STAGE, _RESULT, _RAISED, _NO_FIT = "stage", "result", "raised", "no_fit"
# The part of the time limit after which measurements that may be left out are left out.
_OPTIONAL_UNTIL = 0.7
_MOST_MEMBERS = 4
_MAX_MEASURED_LAYERS = 24  # each takes about 0.15 s to trace


@dataclass(frozen=True)
class _ProbeRequest:
    """What is to be measured."""

    workers: Sequence[int]  # numbers of workers, whose parts of a batch are measured
    methods: Sequence[str]  # compression methods
    with_xla: bool  # whether steps are compiled by XLA, too
    timeout_seconds: float  # the time limit of the process
    started: float  # when the process was started, in seconds since 1970

    @property
    def has_time(self) -> bool:
        """Whether there is time for what may be left out."""
        return time.time() - self.started < _OPTIONAL_UNTIL * self.timeout_seconds


class _ProgramProbe:
    """Measures a model."""

    def __init__(self, request: _ProbeRequest, strategy: ProbeStrategy, enter_stage: Callable[[str], None]) -> None:
        """Prepares measurements; `enter_stage` is called with what is measured next."""
        self._request, self._strategy, self._enter_stage = request, strategy, enter_stage

    def measure(self, model: Any, fit: Callable[..., Any], arguments: Mapping[str, Any]) -> ProgramMeasurement:
        """Measures `model` on the data of its `fit`, which was called with `arguments`."""
        self._enter_stage("reads the first batches of the data")
        data = first_batches(model, fit, arguments)
        process_bytes = resident_bytes()
        steps = WorkerSteps(self._strategy, model, fit, data)
        counts = sorted(set(self._request.workers) | {1})
        members = next((count for count in counts if count > 1), 2)
        rows = _rows(data, members)
        self._enter_stage(f"trains on {rows} of {data.rows} samples to see the gradients")
        observed = steps.observe(members, rows)
        start_seconds = time.time() - self._request.started
        measured = self._steps(steps, data, counts, compiled=False)
        self._enter_stage("times the forward pass and the update")
        update_seconds = steps.update_seconds(members, observed.updates)
        alone = next(step.seconds for step in measured if step.rows == rows)
        computing = max(alone - update_seconds, 0.0)
        forward_seconds = steps.forward_seconds(members, rows)
        if forward_seconds is None or forward_seconds >= computing:
            forward_seconds = computing / 3  # backpropagation computes two products for each one of the forward pass
        part = forward_seconds / computing if computing else 0.0
        exchanges = self._exchanges(observed.updates, counts)
        computation = measured[-1].seconds - update_seconds
        measured += self._compiled_steps(steps, data, counts)
        inputs = keras.utils.unpack_x_y_sample_weight(data.batches[0])[0]
        graph = _graph_of_stages(model, self._strategy, inputs)
        layers: tuple[LayerMeasurement, ...] = ()
        if graph is not None:
            self._enter_stage("times the layers")
            layers = _layer_table(graph, inputs, computation, may_measure=self._request.has_time)
        trainable = model.trainable_variables
        return ProgramMeasurement(
            rows=data.rows,
            samples=_samples(arguments, data),
            steps=tuple(_split(step, part, update_seconds) for step in measured),
            exchanges=tuple(exchanges),
            bucket_ready=bucket_ready(observed.bucket_times, forward_seconds),
            layers=layers,
            variable_bytes=_bytes(model.variables),
            gradient_bytes=_bytes(trainable),
            slot_bytes=sum(_bytes(optimizer.variables) for optimizer in optimizers_of(model)),
            process_bytes=process_bytes,
            data_seconds=data.seconds,
            is_functional=graph is not None,
            optimizer=", ".join(
                dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers_of(model) if optimizer.built)
            ),
            save_seconds=_save_seconds(model),
            start_seconds=start_seconds,
            exchanges_per_step=observed.exchanges_per_step,
            other_collectives=tuple(observed.other_collectives),
        )

    def _steps(
        self, steps: WorkerSteps, data: FirstBatches, counts: Sequence[int], *, compiled: bool
    ) -> list[StepMeasurement]:
        """Measures smaller batches first, so that the peaks of memory are those of each."""
        by_rows = {_rows(data, count): count for count in sorted(counts)}
        measurements = []
        for rows, members in sorted(by_rows.items()):
            self._enter_stage(f"times steps on {rows} samples{' compiled by XLA' if compiled else ''}")
            measurements.append(steps.measure(members, rows, compiled=compiled))
            if compiled and not self._request.has_time:
                return []
        return measurements

    def _compiled_steps(self, steps: WorkerSteps, data: FirstBatches, counts: Sequence[int]) -> list[StepMeasurement]:
        if not self._request.with_xla or not self._request.has_time:
            return []
        try:
            return self._steps(steps, data, counts, compiled=True)
        except Exception:  # XLA cannot compile the model, which is then no plan
            return []

    def _exchanges(self, updates: Sequence[Any], counts: Sequence[int]) -> list[ExchangeMeasurement]:
        measurements: list[ExchangeMeasurement] = []
        for method in (DENSE, *self._request.methods):
            error: float | None = None
            for members in (2, _MOST_MEMBERS) if max(counts) > 2 else (2,):
                if method != DENSE and not self._request.has_time:
                    continue
                self._enter_stage(f"times the exchange of gradients, {method}, {members} workers")
                measurements.append(measure_exchange(self._strategy, updates, method, members, error))
                error = measurements[-1].gradient_error
        return measurements


def _rows(data: FirstBatches, members: int) -> int:
    return max(1, data.rows // members)


def _split(step: StepMeasurement, forward_part: float, update_seconds: float) -> StepMeasurement:
    update = min(update_seconds, step.seconds)
    return replace(step, forward_seconds=forward_part * (step.seconds - update), update_seconds=update)


def _samples(arguments: Mapping[str, Any], data: FirstBatches) -> int | None:
    first: Any = next(iter(keras.tree.flatten(arguments.get("x"))), None)
    is_array = hasattr(first, "shape") and hasattr(first, "dtype") and not arguments.get("validation_split")
    if is_array and arguments.get("steps_per_epoch") is None and len(first.shape):
        return int(first.shape[0])
    return None if data.steps is None else data.steps * data.rows


def _bytes(variables: Sequence[Any]) -> int:
    distinct = {id(variable): variable for variable in variables}.values()
    return sum((tf.TensorShape(variable.shape).num_elements() or 0) * _item_bytes(variable) for variable in distinct)


def _item_bytes(tensor: Any) -> int:
    return int(tf.as_dtype(keras.backend.standardize_dtype(tensor.dtype)).size)


def _save_seconds(model: Any) -> float:
    start = time.perf_counter()
    file = io.BytesIO()
    for variable in itertools.chain(model.variables, *(optimizer.variables for optimizer in optimizers_of(model))):
        file.write(memoryview(keras.ops.convert_to_numpy(variable)).tobytes())
    return time.perf_counter() - start


def _graph_of_stages(model: Any, strategy: Any, x: Any) -> FunctionalGraph | None:
    """Returns the graph of a model that `ModelParallelStrategy` can cut into stages, or None."""
    compiled, model.jit_compile = model.jit_compile, False
    try:
        with tf.Graph().as_default():  # the check is that of a step that is traced
            check_model_for_stages(model, strategy, "train_step")
        return graph_of(model, x)
    except Exception:  # the reason is one that the strategy gives when it is used
        return None
    finally:
        model.jit_compile = compiled


def _layer_table(
    graph: FunctionalGraph, x: Any, step_seconds: float, *, may_measure: bool
) -> tuple[LayerMeasurement, ...]:
    """Returns the layer calls of a graph, measured with the inputs `x` if there is time.

    `step_seconds`, the time of both passes, is split by estimates if there are many calls or recurrent layers, whose
    gradients take 10 s to trace alone.
    """
    estimates = [float(estimated_cost(call)) for call in graph.calls]
    scale = step_seconds / (sum(estimates) or 1.0)
    seconds = {call.name: estimate * scale for call, estimate in zip(graph.calls, estimates, strict=True)}
    recurrent = any(isinstance(call.operation, keras.layers.RNN) for call in graph.calls)
    if may_measure and not recurrent and len(graph.calls) <= _MAX_MEASURED_LAYERS:
        seconds = measured_costs(graph, x, "/device:CPU:0")
    counted: set[int] = set()
    return tuple(
        LayerMeasurement(
            call.name,
            seconds[call.name],
            _parameters(call.variables, counted),
            sum(elements_of(tensor) * _item_bytes(tensor) for tensor in call.outputs),
        )
        for call in graph.calls
    )


def _parameters(variables: Sequence[Any], counted: set[int]) -> int:
    """Counts the trainable weights that no earlier call has."""
    uncounted = [variable for variable in variables if variable.trainable and id(variable) not in counted]
    counted.update(map(id, uncounted))
    return sum(tf.TensorShape(variable.shape).num_elements() or 0 for variable in uncounted)


class _Channel:
    """The pipe to the parent."""

    def __init__(self, descriptor: int) -> None:
        """Writes to `descriptor`, which the program's children do not inherit."""
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def send(self, kind: str, value: Any) -> None:
        self._file.write(json.dumps({kind: value}) + "\n")

    def end(self, kind: str, value: Any) -> NoReturn:
        """Sends the last message and ends the process without the exit handlers of the program."""
        self.send(kind, value)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def main(argv: list[str]) -> None:
    """Runs a program; `argv`: the descriptor of the pipe, the request as JSON, the script and its arguments."""
    channel, request, script = _Channel(int(argv[0])), _ProbeRequest(**json.loads(argv[1])), argv[2:]
    strategy = ProbeStrategy()
    bare_bytes = resident_bytes()
    stand_in_for_all(strategy)
    probe = _ProgramProbe(request, strategy, lambda text: channel.send(_STAGE, text))
    _measure_first_fit(probe, channel, bare_bytes)
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    channel.send(_STAGE, "runs the program up to its first `fit`")
    try:
        with strategy.scope():
            runpy.run_path(script[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            channel.end(_RAISED, f"SystemExit: {exit_.code}")
    except BaseException as error:
        traceback.print_exc()
        channel.end(_RAISED, _described(error))
    channel.end(_NO_FIT, script[0])


def _measure_first_fit(probe: _ProgramProbe, channel: _Channel, bare_bytes: int) -> None:
    """Makes the first `fit` of any model the measurement, after which the process ends."""
    fit = keras.Model.fit
    signature = inspect.signature(fit)

    def measured_fit(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        keras.Model.fit = fit
        began = time.monotonic()
        try:
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            arguments.pop("self", None)
            result = probe.measure(self, fit, arguments)
        except BaseException as error:  # the program must not continue with a model that was measured
            traceback.print_exc()
            channel.end(_RAISED, _described(error))
        channel.send(_STAGE, f"has measured the model in {time.monotonic() - began:.1f} s")
        channel.end(_RESULT, {"program": asdict(result), "bare_bytes": bare_bytes})

    keras.Model.fit = measured_fit


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


if __name__ == "__main__":
    main(sys.argv[1:])
