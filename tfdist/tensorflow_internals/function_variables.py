"""Variables that a function creates on the device where it runs, in place of variables elsewhere."""

from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

_BaseResourceVariable = private(
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable", "a variable with a handle of a function's graph"
)


class FunctionVariable(_BaseResourceVariable):  # type: ignore[misc, valid-type]
    """A variable that stands for another one while a function is traced.

    Its memory belongs to the device that runs the function, and is used again by later calls.

    Attributes:
        is_assigned: Whether code that was traced so far assigns to it.
    """

    def __init__(self, variable: Any, initial_value: tf.Tensor, name: str) -> None:
        """Creates it, and assigns its initial value whenever the function runs.

        Args:
            variable: The `tf.Variable` that it stands for.
            initial_value: Of the same shape and dtype.
            name: Of its memory, unique on the device.
        """
        shape, dtype = variable.shape, variable.dtype
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
        # Keras' optimizers find the slots of a variable by its unique id.
        super().__init__(
            trainable=variable.trainable,
            shape=shape,
            dtype=dtype,
            handle=handle,
            unique_id=variable._unique_id,
            handle_name=variable.name.partition(":")[0],
            in_graph_mode=False,
        )
        super().assign(tf.ensure_shape(initial_value, shape))
        self.is_assigned = False

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        """As of a `tf.Variable`."""
        self.is_assigned = True
        return super().assign(*args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        """As of a `tf.Variable`."""
        self.is_assigned = True
        return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        """As of a `tf.Variable`."""
        self.is_assigned = True
        return super().assign_sub(*args, **kwargs)
