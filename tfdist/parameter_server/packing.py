"""What a worker returns, in one tensor: each tensor that the chief fetches is a round trip of its own."""

from typing import Any

import numpy as np
import tensorflow as tf

# As which numbers of how many bytes travel: their bits are kept, which a cast of floats does not do with the smallest.
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class Packing:
    """Packs structures of tensors in functions, and unpacks them on the chief.

    >>> import tensorflow as tf
    >>> packing = Packing()
    >>> pack = tf.function(lambda: packing.pack({"count": tf.constant(2**62 + 1, tf.int64), "sums": [tf.ones([2])]}))
    >>> packing.unpack(pack())
    {'count': array(4611686018427387905), 'sums': [array([1., 1.], dtype=float32)]}
    """

    def __init__(self) -> None:
        """Has packed nothing yet."""
        self._layouts: list[tuple[Any, list[tuple[tf.DType, list[int]] | None]]] = []

    def pack(self, structure: Any) -> list[tf.Tensor]:
        """In a function: numbers of known shape in one tensor, and after it what cannot be in it."""
        packed, apart, layout = [], [], list[tuple[tf.DType, list[int]] | None]()
        for value in tf.nest.flatten(structure):
            tensor = tf.convert_to_tensor(value)
            if tensor.shape.is_fully_defined() and _is_number(tensor.dtype):
                packed.append(tf.reshape(_bits(tensor), [-1]))
                layout.append((tensor.dtype, tensor.shape.as_list()))
            else:
                apart.append(tensor)
                layout.append(None)
        # Each trace may have a layout of its own, so the tensor says which is its.
        number = tf.constant([len(self._layouts)], tf.int64)
        self._layouts.append((tf.nest.map_structure(lambda _: 0, structure), layout))
        return [tf.concat([number, *packed], 0), *apart]

    def unpack(self, tensors: list[Any]) -> Any:
        """The structure that `pack` was given, of NumPy arrays, and of tensors where they travelled apart."""
        numbers, apart = np.asarray(tensors[0]), iter(tensors[1:])
        structure, layout = self._layouts[int(numbers[0])]
        values: list[Any] = []
        start = 1
        for place in layout:
            if place is None:
                values.append(next(apart))
                continue
            dtype, shape = place
            part = numbers[start : start + int(np.prod(shape))]
            start += len(part)
            if dtype == tf.bool:
                value = part.astype(bool)
            else:
                value = part.astype(_INTEGERS[dtype.size].as_numpy_dtype).view(dtype.as_numpy_dtype)
            values.append(value.reshape(shape))
        return tf.nest.pack_sequence_as(structure, values)


def _is_number(dtype: tf.DType) -> bool:
    return dtype == tf.bool or ((dtype.is_integer or dtype.is_floating) and dtype.size in _INTEGERS)


def _bits(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype != tf.bool:
        tensor = tf.bitcast(tensor, _INTEGERS[tensor.dtype.size])
    return tf.cast(tensor, tf.int64)
