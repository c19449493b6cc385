"""Packs what a worker returns into one tensor, as each tensor that the chief fetches is a separate round trip."""

from typing import Any

import numpy as np
import tensorflow as tf

# The integer type by which a number of so many bytes is sent: it keeps all bits; a cast would lose denormal floats.
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class ResultPacking:
    """Packs structures of tensors in functions, and unpacks them on the chief.

    >>> import tensorflow as tf
    >>> packing = ResultPacking()
    >>> pack = tf.function(lambda: packing.pack({"count": tf.constant(2**62 + 1, tf.int64), "sums": [tf.ones([2])]}))
    >>> packing.unpack(pack())
    {'count': array(4611686018427387905), 'sums': [array([1., 1.], dtype=float32)]}
    """

    def __init__(self) -> None:
        self._layouts: list[tuple[Any, list[tuple[tf.DType, list[int]] | None]]] = []

    def pack(self, structure: Any) -> list[tf.Tensor]:
        """In a function: packs numbers of known shape into the first tensor; the others follow as they are."""
        packed, separate, layout = [], [], list[tuple[tf.DType, list[int]] | None]()
        for value in tf.nest.flatten(structure):
            tensor = tf.convert_to_tensor(value)
            if tensor.shape.is_fully_defined() and _is_number(tensor.dtype):
                packed.append(tf.reshape(_bits(tensor), [-1]))
                layout.append((tensor.dtype, tensor.shape.as_list()))
            else:
                separate.append(tensor)
                layout.append(None)
        # Each trace may have another layout; the first number is the layout's index.
        number = tf.constant([len(self._layouts)], tf.int64)
        self._layouts.append((tf.nest.map_structure(lambda _: 0, structure), layout))
        return [tf.concat([number, *packed], 0), *separate]

    def unpack(self, tensors: list[Any]) -> Any:
        """Returns the structure that was packed, as NumPy arrays, with tensors where they were sent separately."""
        numbers, separate = np.asarray(tensors[0]), iter(tensors[1:])
        structure, layout = self._layouts[int(numbers[0])]
        values: list[Any] = []
        start = 1
        for entry in layout:
            if entry is None:
                values.append(next(separate))
                continue
            dtype, shape = entry
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
