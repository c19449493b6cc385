"""A model's variables as copies on the device that runs a function, so that a client trains without the servers."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable, holding
from tfdist.keras_internals.scheduled_training import is_seed_state
from tfdist.private_symbols import private

_SEED_STEP = 0x9E3779B1  # odd, so that 2**32 numbers have distinct seeds

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
        """Creates it, and assigns its initial value, of the shape and dtype of `variable`, whenever the function runs.

        `name` is that of its memory, unique on the device.
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
        self.is_assigned = True
        return super().assign(*args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        self.is_assigned = True
        return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        self.is_assigned = True
        return super().assign_sub(*args, **kwargs)


class InitialSlots:
    """The values with which an optimizer's own variables start: counts, moments, averages.

    On the servers they stay as they were created, as clients update copies.
    """

    def __init__(self, optimizer: Any) -> None:
        """Reads the values. `optimizer` is built."""
        self._optimizer = optimizer
        rate = optimizer._learning_rate
        self.variables = [variable for variable in _variables_of(optimizer) if variable is not rate]
        self._values: dict[int, np.ndarray | None] = {}
        for variable in self.variables:
            value = held_variable(variable).numpy()
            is_uniform = value.size > 0 and bool((value == value.flat[0]).all())
            self._values[id(variable)] = np.asarray(value.flat[0]) if is_uniform else None
        self._values[id(optimizer._iterations)] = np.zeros([], optimizer._iterations.dtype)

    def value(self, variable: Any) -> tf.Tensor | None:
        """The initial value of one of `variables`; `None` if it must be read."""
        constant = self._values[id(variable)]
        return None if constant is None else tf.fill(variable.shape, tf.cast(constant, held_variable(variable).dtype))


def _variables_of(optimizer: Any) -> list[Any]:
    """All variables of an optimizer, also those that Keras does not list (Nadam's product of its momenta)."""
    listed = list(optimizer.variables)
    known = {id(variable) for variable in listed}
    unlisted = [
        value for value in vars(optimizer).values() if isinstance(value, keras.Variable) and id(value) not in known
    ]
    return listed + unlisted


class LocalCopies:
    """Copies of all variables that a step of a model reads or changes.

    Attributes:
        bytes_pulled: Payload bytes of the values that were read from the servers.
    """

    def __init__(
        self, model: Any, slots: InitialSlots, number: tf.Tensor, pull_dtype: tf.DType | None, name: str
    ) -> None:
        """Creates the copies of a built model in the function that is being traced.

        The seeds of random layers depend on `number`, an int64 scalar. Trainable float32 variables cross the network as
        `pull_dtype`; `None`: unchanged. `name`, of their memory, is unique to the model.
        """
        self._model, self.bytes_pulled = model, 0
        optimizer = model.optimizer
        metrics = {id(variable) for variable in model.metrics_variables}
        of_optimizer = {id(variable) for variable in slots.variables}
        rate = optimizer._learning_rate
        every = [*model.variables, *model.metrics_variables, *slots.variables]
        every += [rate] if isinstance(rate, keras.Variable) else []
        self._copies: dict[int, tuple[Any, FunctionVariable, tf.Tensor]] = {}
        for variable in every:
            if id(variable) in self._copies:
                continue
            server, value = held_variable(variable), None
            if id(variable) in metrics:
                value = tf.zeros(server.shape, server.dtype)
            elif id(variable) in of_optimizer:
                value = slots.value(variable)
            if value is None:
                value = self._pulled(server, pull_dtype if variable.trainable else None)
            if is_seed_state(variable):
                seed = tf.bitwise.bitwise_and(number * _SEED_STEP, 0xFFFFFFFF)
                value = tf.stack([value[0] + tf.cast(seed, value.dtype), value[1]])
            copy = FunctionVariable(server, value, f"{name}/{len(self._copies)}")
            self._copies[id(variable)] = variable, copy, value
        self._excluded = metrics | of_optimizer | {id(rate)}
        self._rate = rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            self._rate = tf.cast(rate(held_variable(optimizer._iterations).read_value()), tf.float32)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context the model's variables are the copies. A schedule of learning rates counts rounds."""
        optimizer = self._model.optimizer
        rate = optimizer._learning_rate
        with holding({key: (variable, copy) for key, (variable, copy, _) in self._copies.items()}):
            try:
                object.__setattr__(optimizer, "_learning_rate", self._rate)  # bypasses Keras' tracking of attributes
                yield
            finally:
                object.__setattr__(optimizer, "_learning_rate", rate)

    def before_and_after(self, variable: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the value with which a variable started, and its present one."""
        _, copy, before = self._copies[id(variable)]
        return before, copy.read_value()

    def initial_value(self, copy: tf.Variable) -> tf.Tensor:
        """Returns the value with which a copy started."""
        return next(before for _, local_copy, before in self._copies.values() if local_copy is copy)

    def present(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        return [self._copies[id(variable)][1].read_value() for variable in variables]

    def changed(self) -> Mapping[tf.Variable, tuple[tf.Tensor, tf.Tensor]]:
        """The values before and after of variables that are assigned, but not trained, by variable of the servers.

        Metrics, seeds and the optimizer's variables are left out.
        """
        return {
            held_variable(variable).ref(): (before, copy.read_value())
            for variable, copy, before in self._copies.values()
            if copy.is_assigned
            and not (id(variable) in self._excluded or variable.trainable or is_seed_state(variable))
        }

    def _pulled(self, server: tf.Variable, dtype: tf.DType | None) -> tf.Tensor:
        smaller = dtype if dtype is not None and server.dtype == tf.float32 else server.dtype
        self.bytes_pulled += (server.shape.num_elements() or 0) * smaller.size
        with tf.device(server.device):
            sent = tf.cast(server.read_value(), smaller)
        return tf.cast(sent, server.dtype)
