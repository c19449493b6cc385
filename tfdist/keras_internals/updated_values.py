"""What optimizers update in place of variables: values of parts, or complete ones if an element depends on others."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import decay_weights
from tfdist.private_symbols import private

_MUON = (keras.optimizers.Muon,) if hasattr(keras.optimizers, "Muon") else ()  # which the oldest Keras may not have
# The optimizers that need complete values.
GATHERING = (keras.optimizers.Adafactor, *_MUON)
if _MUON:
    private("keras.src.optimizers.muon:Muon._should_use_adamw", "which variables Muon updates element by element")


class UpdatedValue:
    """The value of a variable or of a part of it, which an optimizer reads, updates and decays like a `tf.Variable`.

    Attributes:
        value: The present value, a tensor.
        path: The path of the Keras variable; only decays of weights need it.
        is_read: Whether the first value was used.
        is_written: Whether it has another value than the first one.
    """

    def __init__(self, value: tf.Tensor, held: Any, path: str = "") -> None:
        """Stands for `value` of the variable that `held` holds, which it does not change."""
        self.value, self._held, self.path = value, held, path
        self.is_read = self.is_written = False

    def _distributed_container(self) -> Any:
        return self._held  # by which an optimizer finds the slots

    @property
    def device(self) -> str:
        return str(self._held.device)

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.value.shape

    def assign(self, value: Any) -> None:
        self.value = tf.cast(value, self.dtype)
        self.is_written = True

    def assign_add(self, value: Any) -> None:
        self.assign(tf.convert_to_tensor(self) + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        self.assign(tf.convert_to_tensor(self) - tf.cast(value, self.dtype))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtracts rows, of which several may have the same index."""
        self.assign(tf.tensor_scatter_nd_sub(tf.convert_to_tensor(self), rows.indices[:, tf.newaxis], rows.values))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        self.is_read |= not self.is_written
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    # Decays of weights use these operators.
    def __mul__(self, other: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self) * other

    def __sub__(self, other: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self) - other


def updates_elements(optimizer: Any, variable: keras.Variable) -> bool:
    """Whether one of `GATHERING` updates each element of a variable by itself."""
    return isinstance(optimizer, _MUON) and optimizer._should_use_adamw(variable)


def slots_of(optimizer: Any, variable: keras.Variable) -> list[keras.Variable]:
    """Returns the slots of a variable: the items of the optimizer's lists at its position, except averages."""
    index, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    apart = ("_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients")
    lists: Sequence[Any] = [
        value
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == count and name not in apart
    ]
    return [slot_list[index] for slot_list in lists if isinstance(slot_list[index], keras.Variable)]


def update_step(optimizer: Any, gradient: Any, variable: UpdatedValue) -> None:
    """Decays and updates the value of a variable, in Keras' order."""
    decay_weights(optimizer, [variable])
    optimizer.update_step(gradient, variable, optimizer.learning_rate)
