"""Encodes a worker's gradients and pushes them to the servers, which apply them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression import Compressor, ErrorFeedback, MomentumCorrection, Policy
from tfdist.compression.gradient_tensors import all_finite, divided, sum_duplicate_rows, values_of
from tfdist.keras_internals.keras_symbols import AutocastScope
from tfdist.keras_internals.scheduled_training import EncodedGradient, update_counter
from tfdist.parameter_server.worker_scope import StepUpdates
from tfdist.parameter_server.worker_step import StepResult
from tfdist.tensorflow_internals.cluster_coordinator import worker_index
from tfdist.updates.update_engine import apply_if_finite

_ENCODED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
_MARK = "mark"  # of the last round, beside the state from before it


class GradientEncoder:
    """Encodes the gradient of each variable as the compression policy says.

    The state of a compressor is a variable of each worker; on a restarted worker it starts from its initial value.
    """

    def __init__(self, policy: Policy, new_worker_variable: Callable[[tf.Tensor], tf.Variable]) -> None:
        """Encodes by `policy`. A new worker variable is one on each worker, with an initial value."""
        self._policy = policy
        self._new_worker_variable = new_worker_variable
        self._state: dict[str, dict[str, tf.Variable]] = {}
        self._before_round: dict[str, dict[str, tf.Variable]] = {}

    def prepare(self, paths: Sequence[str], shapes: Sequence[tf.TensorShape], *, may_skip_rounds: bool = False) -> None:
        """Creates the compressors' state for these variables. Call this outside of functions."""
        for path, shape in zip(paths, shapes, strict=True):
            compressor, has_state = self._policy.resolve(path, shape)
            initial = compressor.initial_state(shape) if has_state else {}
            if has_state and path not in self._state:
                self._state[path] = self._new_variables(initial)
            if initial and may_skip_rounds and path not in self._before_round:
                mark = tf.constant([-1.0, -1.0], tf.float64)
                self._before_round[path] = self._new_variables({**initial, _MARK: mark})

    @property
    def may_skip_rounds(self) -> bool:
        """Whether states are taken back after a round that was skipped."""
        return bool(self._before_round)

    def _new_variables(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Variable]:
        return {name: self._new_worker_variable(value) for name, value in values.items()}

    def encode(
        self, gradient: Any, path: str, is_applied: tf.Tensor | None = None, round_mark: tf.Tensor | None = None
    ) -> tuple[EncodedGradient, Any]:
        """Encodes a gradient, dense or `tf.IndexedSlices`, of the variable at `path`.

        `is_applied` says whether the update is made, a bool scalar; `None` if it certainly is. The state of the
        compressor does not change otherwise: a residual is what remains of values that were sent. Where only all parts
        of a round together tell whether the update is made, the gradient has a `round_mark`: the state of a round that
        was skipped is taken back in the next one. Also returns its size in bytes on the network, a number or an int64
        scalar.
        """
        if isinstance(gradient, tf.IndexedSlices):
            return self._encode_rows(gradient, path)
        compressor, has_state = self._policy.resolve(path, gradient.shape)
        shape, dtype = gradient.shape, gradient.dtype
        if not has_state or dtype not in _ENCODED_DTYPES:
            return EncodedGradient([gradient], lambda tensors: tensors[0]), shape.num_elements() * dtype.size
        state = self.read_state(path)
        if round_mark is not None and path in self._before_round:  # some methods have no state
            state = self._without_skipped_round(path, state, round_mark)
        payload, new_state = compressor.encode(tf.cast(gradient, tf.float32), state)
        if is_applied is not None:
            new_state = {name: tf.where(is_applied, value, state[name]) for name, value in new_state.items()}
        self.write_state(path, new_state)
        names = sorted(payload)

        def decode(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            return tf.cast(compressor.decode(dict(zip(names, tensors, strict=True)), shape), dtype)

        return EncodedGradient([payload[name] for name in names], decode), compressor.payload_bytes(shape)

    def read_state(self, path: str) -> dict[str, tf.Tensor]:
        """Returns the state of the compressor of the variable at `path` on this worker."""
        return {name: tf.convert_to_tensor(variable) for name, variable in self._state[path].items()}

    def write_state(self, path: str, new_state: dict[str, tf.Tensor]) -> None:
        """Stores the state of the compressor of the variable at `path` on this worker."""
        for name, value in new_state.items():
            self._state[path][name].assign(value)

    def _without_skipped_round(self, path: str, state: dict[str, tf.Tensor], mark: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the state without what the last round has changed if it was skipped, and keeps that for the next."""
        variables = self._before_round[path]
        before = {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}
        last = before.pop(_MARK)
        is_skipped = tf.logical_and(tf.equal(last[0], mark[0]), tf.not_equal(last[1], mark[1]))
        state = {name: tf.where(is_skipped, before[name], value) for name, value in state.items()}
        # A worker that computes the part of a lost one, too, has two in a round.
        is_same_round = tf.reduce_all(tf.equal(last, mark))
        for name, value in state.items():
            variables[name].assign(tf.where(is_same_round, before[name], value))
        variables[_MARK].assign(mark)
        return state

    def _encode_rows(self, gradient: tf.IndexedSlices, path: str) -> tuple[EncodedGradient, Any]:
        # Rows that were looked up several times are summed and sent once.
        summed = sum_duplicate_rows(gradient)
        rows, indices, dense_shape, dtype = summed.values, summed.indices, summed.dense_shape, summed.values.dtype
        row_shape = gradient.values.shape[1:]
        compressor = self._rows_compressor(path, dense_shape)
        count = tf.size(indices, out_type=tf.int64)
        if compressor is None:
            size = count * ((row_shape.num_elements() or 0) * dtype.size + indices.dtype.size)
            return EncodedGradient([rows, indices], lambda tensors: tf.IndexedSlices(*tensors, dense_shape)), size
        payload, _ = compressor.encode(tf.cast(rows, tf.float32), compressor.initial_state([]))
        names = sorted(payload)

        def decode(tensors: Sequence[tf.Tensor]) -> tf.IndexedSlices:
            received = dict(zip(names, tensors[:-1], strict=True))
            shape = tf.concat([tf.shape(tensors[-1]), tf.constant(row_shape.as_list(), tf.int32)], 0)
            return tf.IndexedSlices(tf.cast(compressor.decode(received, shape), dtype), tensors[-1], dense_shape)

        size = tf.add_n([tf.size(payload[name], out_type=tf.int64) * payload[name].dtype.size for name in names])
        return EncodedGradient([payload[name] for name in names] + [indices], decode), size + count * indices.dtype.size

    def _rows_compressor(self, path: str, dense_shape: Any) -> Compressor | None:
        shape = tf.get_static_value(dense_shape)
        if shape is None:
            return None
        compressor, has_state = self._policy.resolve(path, shape.tolist())
        # A residual would be as large as the table on each worker, which looking up rows is to avoid.
        has_residual = isinstance(compressor, ErrorFeedback | MomentumCorrection)
        return compressor if has_state and compressor.encodes_rows and not has_residual else None


class Push(StepUpdates):
    """The push of a worker's step: updates the variables on their servers at the end of each phase.

    Concurrent additions by other workers are not lost.
    """

    def __init__(self, model_optimizer: Any, encoder: GradientEncoder, micro_steps: int) -> None:
        """Prepares a push of `micro_steps` micro-steps. `model_optimizer` has the count of updates."""
        self._counter, self._encoder, self._micro_steps = update_counter(model_optimizer), encoder, micro_steps
        self._is_counted = False
        self._updates: tf.Tensor | None = None  # before the first update
        self._sizes: list[Any] = []

    def end_phase(self, number: int, pushed: list[tuple[Any, list[Any]]], changes: list[tuple[Any, Any]]) -> None:
        if self._micro_steps > 1:
            raise ValueError(
                "A step reads variables that it has updated before, while gradients of several batches are "
                f"accumulated. Received: gradient_accumulation_steps={self._micro_steps} in asynchronous mode. "
                "Expected: 1. Use larger batches, or ParameterServerStrategy(mode=Synchronous())."
            )
        with AutocastScope(None):  # the step may be in the call of a layer
            self._update(pushed, changes)

    def finish(self, result: StepResult) -> dict[str, tf.Tensor]:
        """Makes the updates of the last phase; returns the report for the chief, see `push_report`."""
        self._update(list(zip(result.optimizers, result.gradients, strict=True)), result.changes)
        if not self._is_counted:
            self._counter.assign_add(tf.ones([], self._counter.dtype))
        return push_report(result, self._updates - result.updates, self._sizes)

    def _update(self, pushed: list[tuple[Any, list[Any]]], changes: list[tuple[Any, Any]]) -> None:
        if self._updates is None:
            with tf.control_dependencies([values_of(gradient) for _, gradients in pushed for gradient in gradients]):
                self._updates = tf.cast(self._counter.read_value(), tf.int64)
        for optimizer, gradients in pushed:
            self._sizes += _update(optimizer, gradients, self._encoder)
            self._is_counted |= optimizer.counter is self._counter
        for variable, change in changes:
            variable.assign_add(change)


def _update(optimizer: Any, gradients: list[Any], encoder: GradientEncoder) -> list[Any]:
    """Returns the sizes of the encoded gradients."""
    means = unscaled(optimizer, gradients)
    # Before they are clipped: `clipvalue` makes infinite values finite.
    finite = None if optimizer.loss_scale is None else all_finite(means)
    clipped = optimizer.clip(means)
    encoded = [encoder.encode(gradient, path, finite) for gradient, path in zip(clipped, optimizer.paths, strict=True)]

    def apply() -> None:
        optimizer.apply([sent for sent, _ in encoded])
        optimizer.constrain()

    optimizer.count(apply_if_finite(optimizer, lambda: finite, apply))
    return [size for _, size in encoded]


def update_directly(optimizer: Any, gradients: list[Any]) -> None:
    """Updates by the gradients of a custom training loop, which schedules its functions itself.

    Keras counts the update afterwards.
    """
    if optimizer.accumulation_steps > 1:
        raise ValueError(
            "Accumulators on the servers would send every micro-step's gradient across the network. Received: an "
            f"optimizer with gradient_accumulation_steps={optimizer.accumulation_steps} in a custom training loop. "
            "Expected: an optimizer without it. Add up the gradients of several batches in the loop."
        )
    means = unscaled(optimizer, gradients)
    apply_if_finite(
        optimizer,
        lambda: all_finite(means),
        lambda: optimizer.apply(optimizer.clip(means)),
        lambda: optimizer.take_back(1),
    )


def round_mark(optimizer: Any) -> tf.Tensor | None:
    """Returns the count of updates and the loss scale, float64 of shape [2], where a round may be skipped, else `None`.

    After a round that was skipped the count is the same and the scale is another one.
    """
    if optimizer.loss_scale is None:
        return None
    return tf.stack([tf.cast(number, tf.float64) for number in (optimizer.counter, optimizer.loss_scale.value)])


def unscaled(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns gradients of the scaled loss, divided by the loss scale."""
    if optimizer.loss_scale is None:
        return gradients
    return [divided(gradient, optimizer.loss_scale.value) for gradient in gradients]


def push_report(result: StepResult, staleness: tf.Tensor, sizes: list[Any]) -> dict[str, tf.Tensor]:
    """Returns what a worker reports to the chief about a push, as int64 scalars."""
    return {
        "worker": tf.cast(worker_index(), tf.int64),
        "staleness": staleness,
        "samples": result.samples,
        "bytes_pushed": tf.add_n([tf.cast(size, tf.int64) for size in sizes] or [tf.constant(0, tf.int64)]),
        "bytes_pulled": result.bytes_pulled,
    }
