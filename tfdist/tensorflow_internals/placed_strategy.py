"""The part of a strategy whose variables are on several devices: one copy each, copies in columns, or in parts."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import (
    OneDeviceExtended,
    OneDeviceReplicaContext,
    ResourceVariable,
    UpdateContext,
)
from tfdist.utils.temporary_values import setting_attributes

_PIECE = 1_000_000  # bytes


class PlacedExtended(OneDeviceExtended):
    """One replica whose variables are on several devices.

    Attributes:
        colocated_with: By the id of a variable that was created beside another one, as slots are, the id of that one.
        beside: The variable beside which variables are being created, or None.
        all_devices: Where variables and their copies are.
    """

    def __init__(self, strategy: Any, chief: str, devices: Sequence[str], all_devices: Sequence[str] = ()) -> None:
        """Creates the implementation of `strategy`.

        Args:
            strategy: The strategy.
            chief: The device of values that are on none of `devices`.
            devices: Where variables are created, as long as it is not known where they belong.
            all_devices: Those of all columns, which also hold copies; by default `devices`.
        """
        super().__init__(strategy, chief)
        self.colocated_with: dict[str, str] = {}
        self.beside: Any = None
        self._devices = tuple(devices)
        self.all_devices = tuple(all_devices or devices)
        self._bytes = dict.fromkeys(self._devices, 0)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        if hasattr(beside, "device"):
            with tf.device(beside.device):
                variable = next_creator(**kwargs)
            self.colocated_with[variable._unique_id] = beside._unique_id
            return variable
        device = self.device_of_next()
        with tf.device(device):
            variable = next_creator(**kwargs)
        self.count_bytes(device, (variable.shape.num_elements() or 0) * variable.dtype.size)
        return variable

    def device_of_next(self) -> str:
        """Returns where the next variable is created: where the fewest bytes are."""
        return min(self._devices, key=self._bytes.__getitem__)

    def count_bytes(self, device: str, size_bytes: int) -> None:
        """Notes that a variable was created on a device."""
        self._bytes[device] += size_bytes

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        with (
            setting_attributes(self, beside=colocate_with_variable),
            super().colocate_vars_with(colocate_with_variable),
        ):
            yield

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        del colocate_with_variable

    # With one replica there is nothing to merge, and a merge call is not possible within a condition.

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        shards = [getattr(variable, "shards", ()) for variable in (var, *args)]  # of split variables, as their averages
        if shards[0] and len({len(parts) for parts in shards}) == 1:
            return [
                self._update(part, fn, other_parts, kwargs, group) for part, *other_parts in zip(*shards, strict=True)
            ]
        with tf.device(var.device), UpdateContext(var.device):
            return fn(var, *args, **kwargs)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), _PlacedReplicaContext(self._container_strategy()):
            return fn(*args, **kwargs)


class _PlacedReplicaContext(OneDeviceReplicaContext):
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns `value`; TensorFlow would copy it to the device of the replica."""
        del reduce_op, options
        return value


class ColumnVariable(ResourceVariable):
    """A variable with copies on other devices, which follow assignments from outside of a training step.

    Attributes:
        copies: The other variables.
        follows: Whether assignments are for all copies; False while a step updates each copy itself.
    """

    copies: tuple[tf.Variable, ...] = ()
    follows = True

    @property
    def in_columns(self) -> tuple[tf.Variable, ...]:
        """By column, the variable itself or its copy."""
        return self, *self.copies

    def numpy(self) -> Any:
        """Returns the value. From another process it comes in pieces, so that only one array of its size is made."""
        if not tf.executing_eagerly() or "/job:localhost/" in self.device or self.dtype.size * _size(self) <= _PIECE:
            return super().numpy()
        return _received(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.numpy(), dtype) if copy else np.asarray(self.numpy(), dtype)

    def _copied(self, result: Any) -> Any:
        if ColumnVariable.follows and self.copies:
            value = self.read_value()
            for copy in self.copies:
                with tf.device(copy.device):
                    copy.assign(value)
                _finish_assignment(copy)
        _finish_assignment(self)
        return result


def _size(variable: tf.Variable) -> int:
    return variable.shape.num_elements() or 0


def _received(variable: tf.Variable) -> np.ndarray:
    """Returns the value of a variable of another process, as of one time."""
    with tf.device(variable.device):
        flat = tf.reshape(variable.read_value(), [-1])  # shares the memory of the variable
    values = np.empty(_size(variable), variable.dtype.as_numpy_dtype)
    piece = _PIECE // variable.dtype.size
    for begin in range(0, values.size, piece):
        with tf.device(variable.device):
            part = flat[begin : begin + piece]
        values[begin : begin + piece] = part.numpy()
    return values.reshape(variable.shape)


def _followed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._copied(method(self, *args, **kwargs))

    return assign


_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "_restore_from_tensors")
# Some assign rows, as optimizers do in the training loops of users.
_OF_ROWS = [name for name in dir(ResourceVariable) if name.startswith(("scatter_", "batch_scatter_"))]
for _name in (*_ASSIGNMENTS, *_OF_ROWS):
    setattr(ColumnVariable, _name, _followed(getattr(ResourceVariable, _name)))


def _finish_assignment(variable: tf.Variable) -> None:
    """Waits for an eager assignment in another process.

    TensorFlow does not wait for it, and a function that is called next may read the earlier value: a metric that is
    reset before the first step of an epoch would keep the count of the last one.
    """
    if tf.executing_eagerly() and "/job:localhost/" not in variable.device:
        # Operations of a task run in their order, so the assignment precedes this one, whose result is small.
        tf.raw_ops.VariableShape(input=variable.handle).numpy()


def variable_like(variable: Any, device: str, value: tf.Tensor | None = None) -> ColumnVariable:
    """Creates a variable on `device` with the identity, for optimizers, of another one, and its value or `value`."""
    with tf.init_scope(), tf.device(device):
        new = ColumnVariable(
            lambda: tf.identity(variable.read_value() if value is None else value),
            dtype=variable.dtype,
            trainable=variable.trainable,
            name=variable.name.partition(":")[0],
            aggregation=variable.aggregation,
            synchronization=variable.synchronization,
        )
    new._unique_id = variable._unique_id
    with tf.init_scope():
        _finish_assignment(new)
    return new


def placed_devices(strategy: Any) -> tuple[str, ...]:
    """Returns the devices of the variables of a strategy, of all columns; none if it does not place them itself."""
    return strategy.extended.all_devices if isinstance(strategy.extended, PlacedExtended) else ()


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
        raise NotImplementedError

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> "SplitValue":
        return self.assign(self.read_value() + tf.cast(value, self.dtype), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> "SplitValue":
        return self.assign(self.read_value() - tf.cast(value, self.dtype), *args, **kwargs)

    def value(self) -> tf.Tensor:
        return self.read_value()

    def numpy(self) -> np.ndarray:
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
