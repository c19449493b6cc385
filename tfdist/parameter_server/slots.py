"""Where the parts of a round wait on the servers until all are there."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.gradients import all_finite, divided
from tfdist.keras_internals.scheduled_training import count_of_updates
from tfdist.keras_internals.sent_updates import SentGradient
from tfdist.parameter_server.encoding import Encoder
from tfdist.parameter_server.push import facts
from tfdist.parameter_server.worker_step import Computed
from tfdist.tensorflow_internals.parameter_server import variable_beside


class Slots:
    """Variables on the servers that take the parts of rounds, each part in a slot of its own.

    A part that is written again, because its worker died before it could tell, is written to the same slot: so it
    counts once. A slot is given away again only when its writer has ended.
    """

    def __init__(self, number: int) -> None:
        """Holds `number` slots, made where they are first needed."""
        self._number = number
        self._dense: dict[Any, tf.Variable] = {}
        self._sparse: dict[Any, list[tuple[tf.Variable, tf.Variable]]] = {}
        self._optimizers: list[tuple[Any, list[tf.Variable]]] = []
        self._changed: list[tf.Variable] = []

    def write(self, computed: Computed, slot: tf.Tensor, encoder: Encoder) -> dict[str, tf.Tensor]:
        """Encodes what a worker has computed and writes it to `slot`; returns what is to be told to the chief."""
        sizes: list[Any] = []
        self._optimizers = [(optimizer, optimizer.servers_variables) for optimizer in computed.optimizers]
        self._changed = [variable for variable, _ in computed.changes]
        for position, (optimizer, variables) in enumerate(self._optimizers):
            gradients = computed.gradients[position]
            if optimizer.loss_scale is not None:
                gradients = [divided(gradient, optimizer.loss_scale.value) for gradient in gradients]
            for index, (gradient, path) in enumerate(zip(gradients, optimizer.paths, strict=True)):
                sent, size = encoder.encode(gradient, path)
                sizes.append(size)
                if isinstance(gradient, tf.IndexedSlices):
                    self._write_rows((position, index), slot, sent, gradient, variables[index])
                else:
                    self._write((position, index), slot, sent, gradient.dtype, variables[index])
        for index, (variable, change) in enumerate(computed.changes):
            self._write(("change", index), slot, SentGradient([change], lambda t: t[0]), change.dtype, variable)
        return facts(computed, tf.constant(0, tf.int64), sizes)

    def update(self, slots: tf.Tensor, weights: tf.Tensor, model_optimizer: Any) -> None:
        """Makes one update of what is in `slots`; in a replica context.

        Args:
          slots: int32, which slots count.
          weights: float64, the part of the batch that each holds; their sum is 1.
          model_optimizer: whose count of updates goes up.
        """
        made = tf.constant(True)
        for position, (optimizer, variables) in enumerate(self._optimizers):
            gradients = [
                self._read((position, index), slots, weights, variable) for index, variable in enumerate(variables)
            ]
            scale = optimizer.loss_scale
            if scale is None:
                _apply(optimizer, gradients)
            else:
                finite = all_finite(gradients)
                tf.cond(finite, lambda o=optimizer, g=gradients: _apply(o, g), lambda: None)
                scale.update(finite)
                made = tf.logical_and(made, finite)
        for index, variable in enumerate(self._changed):
            with tf.device(variable.device):
                parts = tf.gather(self._dense["change", index], slots)
                floating = variable.dtype.is_floating
                change = _weighted(parts, weights) if floating else tf.reduce_max(parts, axis=0)
                variable.assign_add(change)
        count = count_of_updates(model_optimizer)
        count.assign_add(tf.cast(made, count.dtype))

    def _write(self, key: Any, slot: tf.Tensor, sent: SentGradient, dtype: tf.DType, beside: tf.Variable) -> None:
        if key not in self._dense:
            with tf.init_scope():
                zeros = tf.zeros([self._number, *beside.shape], dtype)
                self._dense[key] = variable_beside(zeros, beside)
        with tf.device(beside.device):
            value = sent.decode([tf.identity(tensor) for tensor in sent.tensors])
            tf.raw_ops.ResourceScatterUpdate(resource=self._dense[key].handle, indices=slot, updates=value)

    def _write_rows(
        self, key: Any, slot: tf.Tensor, sent: SentGradient, gradient: tf.IndexedSlices, beside: tf.Variable
    ) -> None:
        if key not in self._sparse:
            width = gradient.values.shape[1:]
            # TensorFlow cannot send the handle of a variable whose rank alone is known to a server.
            with tf.init_scope():
                self._sparse[key] = [
                    (
                        variable_beside(tf.zeros([0, *width], gradient.values.dtype), beside, tf.TensorShape(None)),
                        variable_beside(tf.zeros([0], gradient.indices.dtype), beside, tf.TensorShape(None)),
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

            tf.switch_case(slot, [write_to(*pair) for pair in self._sparse[key]])

    def _read(self, key: Any, slots: tf.Tensor, weights: tf.Tensor, variable: tf.Variable) -> Any:
        with tf.device(variable.device):
            if key in self._dense:
                return _weighted(tf.gather(self._dense[key], slots), weights)
            parts = self._sparse[key]
            share = tf.scatter_nd(slots[:, tf.newaxis], weights, [self._number])
            taken = [tf.reduce_any(tf.equal(slots, number)) for number in range(self._number)]
            values = [
                part.read_value()[: tf.where(use, tf.shape(part)[0], 0)] * tf.cast(share[number], part.dtype)
                for number, ((part, _), use) in enumerate(zip(parts, taken, strict=True))
            ]
            indices = [
                part.read_value()[: tf.where(use, tf.shape(part)[0], 0)]
                for (_, part), use in zip(parts, taken, strict=True)
            ]
            unique, positions = tf.unique(tf.concat(indices, 0))
            rows = tf.math.unsorted_segment_sum(tf.concat(values, 0), positions, tf.size(unique))
            return tf.IndexedSlices(rows, unique, tf.shape(variable))


def _apply(optimizer: Any, gradients: list[Any]) -> None:
    optimizer.apply(optimizer.clip(gradients))
    optimizer.constrain()


def _weighted(parts: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.tensordot(tf.cast(weights, parts.dtype), parts, 1)


def shares(samples: Sequence[int]) -> list[float]:
    """The part of all samples that each part holds."""
    total = sum(samples)
    return [count / total for count in samples]
