"""Measures the model of a program's first `fit`, in its process."""

import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.model_state import optimizers_of
from tfdist.planning.measurements import (
    DENSE,
    ExchangeMeasurement,
    LayerMeasurement,
    ProgramMeasurement,
    StepMeasurement,
)
from tfdist.probe.exchange_costs import bucket_ready, measure_exchange
from tfdist.probe.first_batches import FirstBatches, first_batches
from tfdist.probe.layer_table import graph_of_stages, layer_table
from tfdist.probe.probe_strategy import ProbeStrategy
from tfdist.probe.resident_memory import resident_bytes
from tfdist.probe.worker_steps import WorkerSteps

# Of the time limit: what may be left out is left out after it.
_OPTIONAL_UNTIL = 0.7
_MOST_MEMBERS = 4


@dataclass(frozen=True)
class ProbeRequest:
    """What is to be measured.

    Attributes:
        workers: Numbers of workers, whose parts of a batch are measured.
        methods: Compression methods.
        with_xla: Whether steps are compiled by XLA, too.
        timeout_seconds: The time limit of the process.
        started: When the process was started, in seconds since 1970.
    """

    workers: Sequence[int]
    methods: Sequence[str]
    with_xla: bool
    timeout_seconds: float
    started: float

    @property
    def has_time(self) -> bool:
        """Whether there is time for what may be left out."""
        return time.time() - self.started < _OPTIONAL_UNTIL * self.timeout_seconds


class ProgramProbe:
    """Measures a model."""

    def __init__(self, request: ProbeRequest, strategy: ProbeStrategy, enter_stage: Callable[[str], None]) -> None:
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
        graph = graph_of_stages(model, self._strategy, _inputs(data, data.rows))
        layers: tuple[LayerMeasurement, ...] = ()
        if graph is not None:
            self._enter_stage("times the layers")
            layers = layer_table(graph, _inputs(data, data.rows), computation, may_measure=self._request.has_time)
        trainable = model.trainable_variables
        return ProgramMeasurement(
            rows=data.rows,
            samples=_samples(arguments, data),
            steps=tuple(_split(step, part, update_seconds) for step in measured),
            exchanges=tuple(exchanges),
            bucket_ready=bucket_ready(observed.bucket_times, forward_seconds, statistics.median),
            layers=layers,
            variable_bytes=_bytes(model.variables),
            gradient_bytes=_bytes(trainable),
            slot_bytes=sum(_bytes(optimizer.variables) for optimizer in optimizers_of(model)),
            process_bytes=process_bytes,
            data_seconds=data.seconds,
            is_functional=graph is not None,
            optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in optimizers_of(model) if one.built)),
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
        found = []
        for rows, members in sorted(by_rows.items()):
            self._enter_stage(f"times steps on {rows} samples{' compiled by XLA' if compiled else ''}")
            found.append(steps.measure(members, rows, compiled=compiled))
            if compiled and not self._request.has_time:
                return []
        return found

    def _compiled_steps(self, steps: WorkerSteps, data: FirstBatches, counts: Sequence[int]) -> list[StepMeasurement]:
        if not self._request.with_xla or not self._request.has_time:
            return []
        try:
            return self._steps(steps, data, counts, compiled=True)
        except Exception:  # XLA cannot compile the model, which is then no plan
            return []

    def _exchanges(self, updates: Sequence[Any], counts: Sequence[int]) -> list[ExchangeMeasurement]:
        found: list[ExchangeMeasurement] = []
        for method in (DENSE, *self._request.methods):
            error: float | None = None
            for members in (2, _MOST_MEMBERS) if max(counts) > 2 else (2,):
                if method != DENSE and not self._request.has_time:
                    continue
                self._enter_stage(f"times the exchange of gradients, {method}, {members} workers")
                found.append(measure_exchange(self._strategy, updates, method, members, error))
                error = found[-1].gradient_error
        return found


def _rows(data: FirstBatches, members: int) -> int:
    return max(1, data.rows // members)


def _inputs(data: FirstBatches, rows: int) -> Any:
    return keras.utils.unpack_x_y_sample_weight(data.first_rows(0, rows))[0]


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
    sizes = {id(one): (tf.TensorShape(one.shape).num_elements() or 0) * _item_bytes(one) for one in variables}
    return sum(sizes.values())


def _item_bytes(variable: Any) -> int:
    return int(tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).size)


def _save_seconds(model: Any) -> float:
    start = time.perf_counter()
    file = io.BytesIO()
    variables = [*model.variables, *(one for optimizer in optimizers_of(model) for one in optimizer.variables)]
    for variable in variables:
        file.write(memoryview(keras.ops.convert_to_numpy(variable)).tobytes())
    return time.perf_counter() - start
