"""How a gradient leaves a worker: encoded there, decoded by the server of its variable."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression import Compressor, ErrorFeedback, MomentumCorrection, Policy
from tfdist.keras_internals.sent_updates import SentGradient

_ENCODED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


class Encoder:
    """Encodes what a worker pushes, each variable's gradient as the policy says.

    What a compressor must remember is a variable of each worker, which begins anew on a worker that was started again.
    """

    def __init__(self, policy: Policy, new_worker_variable: Callable[[tf.Tensor], tf.Variable]) -> None:
        """Encodes by `policy`; `new_worker_variable` makes a variable of an initial value on each worker."""
        self._policy = policy
        self._new_worker_variable = new_worker_variable
        self._state: dict[str, dict[str, tf.Variable]] = {}

    def prepare(self, paths: Sequence[str], shapes: Sequence[tf.TensorShape]) -> None:
        """Makes the variables for gradients of these variables; not in a function."""
        for path, shape in zip(paths, shapes, strict=True):
            compressor, has_state = self._policy.compressor_of(path, shape)
            if has_state and path not in self._state:
                initial = compressor.initial_state(shape)
                self._state[path] = {name: self._new_worker_variable(value) for name, value in initial.items()}

    def encode(self, gradient: Any, path: str) -> tuple[SentGradient, Any]:
        """Encodes the gradient of the variable at `path`.

        Args:
          gradient: dense, or `tf.IndexedSlices`.
          path: of the variable.

        Returns:
          The encoded gradient, and how many bytes of it cross the network, a number or an int64 scalar.
        """
        if isinstance(gradient, tf.IndexedSlices):
            return self._encode_rows(gradient, path)
        compressor, has_state = self._policy.compressor_of(path, gradient.shape)
        shape, dtype = gradient.shape, gradient.dtype
        if not has_state or dtype not in _ENCODED_DTYPES:
            return SentGradient([gradient], lambda tensors: tensors[0]), shape.num_elements() * dtype.size
        variables = self._state[path]
        state = {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}
        payload, new_state = compressor.encode(tf.cast(gradient, tf.float32), state)
        for name, value in new_state.items():
            variables[name].assign(value)
        names = sorted(payload)

        def decode(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            return tf.cast(compressor.decode(dict(zip(names, tensors, strict=True)), shape), dtype)

        return SentGradient([payload[name] for name in names], decode), compressor.payload_bytes(shape)

    def _encode_rows(self, gradient: tf.IndexedSlices, path: str) -> tuple[SentGradient, Any]:
        # The rows of one table row each once: the sum of what was looked up several times.
        indices, positions = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
        dense_shape, dtype = gradient.dense_shape, rows.dtype
        row_shape = gradient.values.shape[1:]
        compressor = self._rows_compressor(path, dense_shape)
        count = tf.size(indices, out_type=tf.int64)
        if compressor is None:
            size = count * ((row_shape.num_elements() or 0) * dtype.size + indices.dtype.size)
            return SentGradient([rows, indices], lambda tensors: tf.IndexedSlices(*tensors, dense_shape)), size
        payload, _ = compressor.encode(tf.cast(rows, tf.float32), compressor.initial_state([]))
        names = sorted(payload)

        def decode(tensors: Sequence[tf.Tensor]) -> tf.IndexedSlices:
            received = dict(zip(names, tensors[:-1], strict=True))
            shape = tf.concat([tf.shape(tensors[-1]), tf.constant(row_shape.as_list(), tf.int32)], 0)
            return tf.IndexedSlices(tf.cast(compressor.decode(received, shape), dtype), tensors[-1], dense_shape)

        size = tf.add_n([tf.size(payload[name], out_type=tf.int64) * payload[name].dtype.size for name in names])
        return SentGradient([payload[name] for name in names] + [indices], decode), size + count * indices.dtype.size

    def _rows_compressor(self, path: str, dense_shape: Any) -> Compressor | None:
        shape = tf.get_static_value(dense_shape)
        if shape is None:
            return None
        compressor, has_state = self._policy.compressor_of(path, shape.tolist())
        # A residual of a whole table on each worker is what its rows are looked up to avoid.
        remembers = isinstance(compressor, ErrorFeedback | MomentumCorrection)
        return compressor if has_state and compressor.encodes_rows and not remembers else None
