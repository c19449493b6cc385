"""What takes the place of the `tf.Variable` behind a Keras variable whose value is in parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.placed_strategy import ColumnVariable


class SplitValue:
    """Complete for whoever reads, saves or assigns it. A subclass makes the parts, and knows how they are joined.

    Attributes:
        shards: The parts of the first group of devices, then, in the same order, the equal ones of further groups.
        axis: The axis along which the value is split.
        shape: The shape of the complete value.
    """

    shards: tuple[ColumnVariable, ...] = ()

    def __init__(self, whole: Any, axis: int) -> None:
        """Has the identity of `whole`, a `tf.Variable` or what has its attributes."""
        self.axis, self.shape, self.dtype = axis, whole.shape, whole.dtype
        self.name, self.trainable = whole.name, whole.trainable
        self.aggregation, self.synchronization = whole.aggregation, whole.synchronization
        self._shared_name = whole._shared_name  # under which `tf.train.Checkpoint` knows it
        self._unique_id = whole._unique_id

    @property
    def device(self) -> str:
        """The device of the first part."""
        return str(self.shards[0].device)

    @property
    def in_columns(self) -> tuple[ColumnVariable, ...]:
        """By column, its part."""
        return self.shards

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns where the part `shards[index]` begins and ends along the axis, without what it is padded by."""
        raise NotImplementedError

    def parts(self) -> Sequence[tuple[Any, Any, ColumnVariable]]:
        """Returns the parts of the first group, each with its place in an array of the complete value.

        Returns:
            By part the place, the place of these values in the part, and the part.
        """
        raise NotImplementedError

    def read_value(self) -> tf.Tensor:
        """Returns the complete value, on the device of the first part."""
        raise NotImplementedError

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> "SplitValue":
        """Assigns the parts of a complete value."""
        raise NotImplementedError

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> "SplitValue":
        """Adds a complete value."""
        return self.assign(self.read_value() + tf.cast(value, self.dtype), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> "SplitValue":
        """Subtracts a complete value."""
        return self.assign(self.read_value() - tf.cast(value, self.dtype), *args, **kwargs)

    def value(self) -> tf.Tensor:
        """Returns the complete value, as `tf.Variable.value` does."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns the complete value."""
        return np.concatenate([shard.numpy()[place] for _, place, shard in self.parts()], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    # What Keras' variables call on what holds their value; other operators convert it to a tensor.
    def __getitem__(self, index: Any) -> tf.Tensor:
        return self.read_value()[index]

    def __neg__(self) -> tf.Tensor:
        return -self.read_value()

    def __abs__(self) -> tf.Tensor:
        return abs(self.read_value())

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise ValueError(
            f"A model with split variables cannot be exported. Received: `export` of a model with {self.name!r}. "
            "Expected: complete variables. Save the model by `model.save`, and export what `keras.models.load_model` "
            "returns outside of the strategy's scope."
        )

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


def _to_tensor(variable: SplitValue, dtype: Any = None, name: Any = None, as_ref: bool = False) -> tf.Tensor:
    del name, as_ref
    value = variable.read_value()
    return value if dtype is None else tf.cast(value, dtype)


tf.register_tensor_conversion_function(SplitValue, _to_tensor)
