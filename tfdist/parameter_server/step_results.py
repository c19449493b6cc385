"""The logs of a step: results of metrics, and other values, which each part of a batch computes for itself.

They are packed into one tensor, as each tensor that the chief fetches is a separate round trip.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.losses.pruned_function import needed_operations
from tfdist.losses.step_logs import are_alike, can_be_averaged, differs, metric_results, names_of

# "values": the logs, a structure of tensors, on the chief of arrays; "is_result": by value and result of a metric,
# whether they are equal.
LogPart = dict[str, Any]


def log_part(
    model: keras.Model, logs: Any, metrics: Sequence[tf.Tensor], mean_of: Callable[[tf.Tensor], tf.Tensor]
) -> LogPart:
    """Returns the logs that a step has returned for a part of a batch. Call this in the step's scope.

    `metrics` are the tensors at which the model's metrics have started. A log that was not computed from them is the
    step's own value, also if it has the name of a metric. `mean_of` returns a scalar as a mean over the part's samples.
    """
    if not isinstance(logs, dict):
        logs = {}
    logs = keras.tree.map_structure(tf.convert_to_tensor, logs)
    leaves = tf.nest.flatten(logs)
    results = metric_results(model)
    equal = [[tf.constant(False)] * len(results) for _ in leaves]
    starts = {value.op.name for value in metrics}
    used_by_results = [starts & needed_operations(result.op).keys() for _, result in results]
    values = []
    for position, (leaf, name) in enumerate(zip(leaves, names_of(logs), strict=True)):
        used_starts = starts & needed_operations(leaf.op).keys()
        possible = [
            index
            for index, (_, result) in enumerate(results)
            if used_starts and used_starts == used_by_results[index] and are_alike(leaf, result)
        ]
        for index in [candidate for candidate in possible if results[candidate][0] == name] or possible:
            equal[position][index] = ~differs(leaf, results[index][1])
        is_own_scalar = not used_starts and can_be_averaged(leaf) and leaf.shape.rank == 0
        values.append(mean_of(leaf) if is_own_scalar else leaf)
    is_result = tf.reshape(tf.convert_to_tensor(equal, tf.bool), [len(leaves), len(results)])
    return {"values": tf.nest.pack_sequence_as(logs, values), "is_result": is_result}


def named_log_part(model: keras.Model, logs: dict[str, Any]) -> LogPart:
    """Does what `log_part` does, for logs of which only the names are known."""
    results = [name for name, _ in metric_results(model)]
    names = names_of(logs)
    is_result = np.array([name == result for name in names for result in results], bool)
    return {"values": logs, "is_result": is_result.reshape([len(names), len(results)])}


def combined_logs(parts: Sequence[LogPart], weights: Sequence[Any]) -> LogPart:
    """Returns the logs of parts together: means of what can be averaged, otherwise the first part's values."""
    if len(parts) == 1:
        return parts[0]
    is_result = parts[0]["is_result"]
    for part in parts[1:]:
        is_result = is_result & part["is_result"]
    leaves = [tf.nest.flatten(part["values"]) for part in parts]
    values = []
    for of_parts in zip(*leaves, strict=True):
        first = of_parts[0]
        if can_be_averaged(first) or (isinstance(first, np.ndarray | np.floating) and first.dtype.kind == "f"):
            first = sum(value * _like(weight, first) for value, weight in zip(of_parts, weights, strict=True))
        values.append(first)
    return {"values": tf.nest.pack_sequence_as(parts[0]["values"], values), "is_result": is_result}


def with_results(part: LogPart, results: Sequence[Any]) -> dict[str, Any]:
    """Returns the logs with the `results` of metrics over all steps, which are in the order of the model's metrics."""
    leaves = tf.nest.flatten(part["values"])
    for position, of_leaf in enumerate(np.asarray(part["is_result"]).reshape([len(leaves), -1])):
        if of_leaf.any():
            leaves[position] = results[int(np.argmax(of_leaf))]
    return dict(tf.nest.pack_sequence_as(part["values"], leaves))


def _like(weight: Any, value: Any) -> Any:
    return tf.cast(weight, value.dtype) if tf.is_tensor(value) else np.asarray(weight, value.dtype)


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
            dtype = tensor.dtype
            is_number = dtype == tf.bool or ((dtype.is_integer or dtype.is_floating) and dtype.size in _INTEGERS)
            if tensor.shape.is_fully_defined() and is_number:
                bits = tensor if dtype == tf.bool else tf.bitcast(tensor, _INTEGERS[dtype.size])
                packed.append(tf.reshape(tf.cast(bits, tf.int64), [-1]))
                layout.append((dtype, tensor.shape.as_list()))
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
