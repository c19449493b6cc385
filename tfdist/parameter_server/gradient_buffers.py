"""Gradient buffers: variables on the servers that hold the parts of a round until all have arrived."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.gradient_tensors import all_finite, sum_duplicate_rows
from tfdist.keras_internals.scheduled_training import EncodedGradient, update_counter
from tfdist.parameter_server.gradient_push import GradientEncoder, push_report, round_mark, unscaled
from tfdist.parameter_server.worker_scope import PhaseEnded, StepUpdates
from tfdist.parameter_server.worker_step import StepResult
from tfdist.tensorflow_internals.server_variables import colocated_variable
from tfdist.updates.update_engine import apply_if_finite


@dataclasses.dataclass(frozen=True)
class _Phase:
    """What the parts of a phase contain: optimizers with the variables that they update, and variables that change."""

    optimizers: list[tuple[Any, list[tf.Variable]]]
    changed: list[tf.Variable]
    is_last: bool


class _PhaseOfRound(StepUpdates):
    """Ends a step at the end of a phase, whose updates the chief makes when all parts have arrived."""

    def __init__(self, number: int, versions: dict[int, dict[int, tuple[tf.Variable, tf.Variable]]]) -> None:
        self._number, self._versions = number, versions

    def end_phase(self, number: int, pushed: list[tuple[Any, list[Any]]], changes: list[tuple[Any, Any]]) -> None:
        if number == self._number:
            raise PhaseEnded

    def version(self, variable: tf.Variable, phase: int) -> tf.Variable:
        for earlier in range(phase, self._number):
            if id(variable) in self._versions[earlier]:
                return self._versions[earlier][id(variable)][1]
        return variable

    def replaced(self, phase: int) -> list[tf.Variable]:
        return [variable for earlier in range(phase, self._number) for variable, _ in self._versions[earlier].values()]


class GradientBuffers:
    """A fixed number of buffers, each of which takes one part of a round.

    If a worker dies before it has reported a part, the part is computed again and written to the same buffer: so it
    counts once. A buffer is reused only after its writer has ended.
    """

    def __init__(self, number: int) -> None:
        """Creates `number` buffers; their variables are created when they are first written."""
        self._number = number
        self._dense: dict[Any, tf.Variable] = {}
        self._sparse: dict[Any, list[tuple[tf.Variable, tf.Variable]]] = {}
        self._phases: dict[int, _Phase] = {}
        # By phase, what it changes, and variables with the values from before.
        self._versions: dict[int, dict[int, tuple[tf.Variable, tf.Variable]]] = {}

    def write(
        self, result: StepResult, buffer: tf.Tensor, encoder: GradientEncoder, phase: int = 0
    ) -> dict[str, tf.Tensor]:
        """Encodes what a worker has computed and writes it to a buffer; returns the report for the chief."""
        sizes: list[Any] = []
        optimizers = [(optimizer, optimizer.servers_variables) for optimizer in result.optimizers]
        changed = [variable for variable, _ in result.changes]
        self._phases[phase] = _Phase(optimizers, changed, result.is_last)
        for position, (optimizer, variables) in enumerate(optimizers):
            gradients = unscaled(optimizer, result.gradients[position])
            mark = round_mark(optimizer) if encoder.may_skip_rounds else None
            for index, (gradient, path) in enumerate(zip(gradients, optimizer.paths, strict=True)):
                sent, size = encoder.encode(gradient, path, round_mark=mark)
                sizes.append(size)
                key = (phase, position, index)
                if isinstance(gradient, tf.IndexedSlices):
                    self._write_rows(key, buffer, sent, gradient, variables[index])
                else:
                    self._write_dense(key, buffer, sent, gradient.dtype, variables[index])
        for index, (variable, change) in enumerate(result.changes):
            sent = EncodedGradient([change], lambda tensors: tensors[0])
            self._write_dense((phase, "change", index), buffer, sent, change.dtype, variable)
        return push_report(result, tf.constant(0, tf.int64), sizes)

    def update(self, buffers: tf.Tensor, weights: tf.Tensor, model_optimizer: Any, phase: int = 0) -> None:
        """Makes the updates of a phase by the parts in `buffers`, an int32 vector. Call this in a replica context.

        `weights`, a float64 vector, are the fractions of the batch in each, whose sum is 1. The count of updates of the
        model's optimizer is incremented in each round, also if no phase uses it.
        """
        contents = self._phases[phase]
        if not contents.is_last:
            self._keep_versions(phase, contents)
        for position, (optimizer, variables) in enumerate(contents.optimizers):
            gradients = [
                self._read((phase, position, index), buffers, weights, variable)
                for index, variable in enumerate(variables)
            ]
            _update(optimizer, gradients)
        for index, variable in enumerate(contents.changed):
            with tf.device(variable.device):
                parts = tf.gather(self._dense[phase, "change", index], buffers)
                floating = variable.dtype.is_floating
                change = _weighted(parts, weights) if floating else tf.reduce_max(parts, axis=0)
                variable.assign_add(change)
        counter = update_counter(model_optimizer)
        counted = (
            phase_optimizer.counter is counter
            for earlier in range(phase + 1)
            for phase_optimizer, _ in self._phases[earlier].optimizers
        )
        if contents.is_last and not any(counted):
            counter.assign_add(tf.ones([], counter.dtype))

    def phase(self, number: int) -> StepUpdates:
        """Returns the updates of a step that ends with phase `number` and computes earlier phases again."""
        return _PhaseOfRound(number, self._versions)

    def _keep_versions(self, phase: int, contents: "_Phase") -> None:
        """Copies on the servers what a phase is about to change: later phases compute the earlier ones again."""
        versions = self._versions.setdefault(phase, {})
        changed = [
            original for optimizer, _ in contents.optimizers for original in optimizer.changed_variables
        ] + contents.changed
        for variable in {id(original): original for original in changed}.values():
            if id(variable) not in versions:
                with tf.init_scope():
                    copy = colocated_variable(tf.zeros(variable.shape, variable.dtype), variable)
                versions[id(variable)] = variable, copy
            with tf.device(variable.device):
                versions[id(variable)][1].assign(variable.read_value())

    def _write_dense(
        self, key: Any, buffer: tf.Tensor, sent: EncodedGradient, dtype: tf.DType, beside: tf.Variable
    ) -> None:
        if key not in self._dense:
            with tf.init_scope():
                zeros = tf.zeros([self._number, *beside.shape], dtype)
                self._dense[key] = colocated_variable(zeros, beside)
        with tf.device(beside.device):
            value = sent.decode([tf.identity(tensor) for tensor in sent.tensors])
            tf.raw_ops.ResourceScatterUpdate(resource=self._dense[key].handle, indices=buffer, updates=value)

    def _write_rows(
        self, key: Any, buffer: tf.Tensor, sent: EncodedGradient, gradient: tf.IndexedSlices, beside: tf.Variable
    ) -> None:
        if key not in self._sparse:
            width = gradient.values.shape[1:]
            # TensorFlow cannot send a server the handle of a variable of which only the rank is known.
            with tf.init_scope():
                self._sparse[key] = [
                    (
                        colocated_variable(tf.zeros([0, *width], gradient.values.dtype), beside, tf.TensorShape(None)),
                        colocated_variable(tf.zeros([0], gradient.indices.dtype), beside, tf.TensorShape(None)),
                    )
                    for _ in range(self._number)
                ]
        with tf.device(beside.device):
            rows = sent.decode([tf.identity(tensor) for tensor in sent.tensors])

            def write_to(values: tf.Variable, indices: tf.Variable) -> Callable[[], tf.Tensor]:
                def write() -> tf.Tensor:
                    values.assign(rows.values)
                    indices.assign(rows.indices)
                    return tf.constant(0)

                return write

            tf.switch_case(buffer, [write_to(*pair) for pair in self._sparse[key]])

    def _read(self, key: Any, buffers: tf.Tensor, weights: tf.Tensor, variable: tf.Variable) -> Any:
        with tf.device(variable.device):
            if key in self._dense:
                return _weighted(tf.gather(self._dense[key], buffers), weights)
            parts = self._sparse[key]
            weight_of = tf.scatter_nd(buffers[:, tf.newaxis], weights, [self._number])
            are_used = [tf.reduce_any(tf.equal(buffers, number)) for number in range(self._number)]
            values = [
                part.read_value()[: tf.where(is_used, tf.shape(part)[0], 0)] * tf.cast(weight_of[number], part.dtype)
                for number, ((part, _), is_used) in enumerate(zip(parts, are_used, strict=True))
            ]
            indices = [
                part.read_value()[: tf.where(is_used, tf.shape(part)[0], 0)]
                for (_, part), is_used in zip(parts, are_used, strict=True)
            ]
            rows = tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), tf.shape(variable))
            return sum_duplicate_rows(rows)


def sample_fractions(samples: Sequence[int]) -> list[float]:
    """Returns the fraction of all samples in each part.

    >>> sample_fractions([3, 1])
    [0.75, 0.25]
    """
    total = sum(samples)
    return [count / total for count in samples]


def _update(optimizer: Any, gradients: list[Any]) -> None:
    def apply() -> None:
        optimizer.apply(optimizer.clip(gradients))
        optimizer.constrain()

    optimizer.count(apply_if_finite(optimizer, lambda: all_finite(gradients), apply))


def _weighted(parts: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.tensordot(tf.cast(weights, parts.dtype), parts, 1)
