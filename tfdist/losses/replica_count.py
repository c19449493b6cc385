"""The number of replicas as a number whose traces in a loss can be found."""

import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_NAME = "num_replicas_to_the_power_"


class _Multiple:
    """A number that is a multiple of a power of the number of replicas.

    Products and quotients with other numbers are multiples, too, unless a float is the left operand, which Python asks
    first. Sums and other functions are plain numbers. TensorFlow converts one to a constant that `power_of_count`
    recognizes.
    """

    power: int

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Converts this to a constant; of the dtype that TensorFlow gives a Python number if `dtype` is None."""
        value = _plain(self)
        if tf.executing_eagerly():
            return tf.constant(value, dtype)
        return tf.constant(value, dtype, name=f"{_NAME}{self.power}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(_plain(self)), (_plain(self),)


class IntMultiple(_Multiple, int):
    """An int that is a multiple of a power of the number of replicas."""


class FloatMultiple(_Multiple, float):
    """A float that is a multiple of a power of the number of replicas."""


def replica_count(number: int) -> int:
    """Returns the number of replicas as an int that is known again in what is computed from it.

    >>> count = replica_count(2)
    >>> count == 2, 1 / count, 8 * count, count + 1
    (True, 0.5, 16, 3)
    """
    return _multiple(number, 1)


def power_of_count(tensor: tf.Tensor) -> int:
    """Returns the power of the number of replicas that a constant of a graph is a multiple of, else 0."""
    _, prefix, power = tensor.op.name.rpartition("/")[2].partition(_NAME)
    return int(power.partition("_")[0]) if prefix else 0


def _multiple(value: Any, power: int) -> Any:
    if not power or type(value) not in (int, float):
        return value
    result = IntMultiple(value) if isinstance(value, int) else FloatMultiple(value)
    result.power = power
    return result


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) else float(value)


def _operator(function: Callable[[Any, Any], Any], sign: int, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            is_asked = is_reflected and sign < 0 and tf.is_tensor(other)  # by TensorFlow, if the dtypes differ
            return function(other, tf.convert_to_tensor(self, other.dtype)) if is_asked else NotImplemented
        power = getattr(other, "power", 0)
        if is_reflected:
            return _multiple(function(_plain(other), _plain(self)), power + sign * self.power)
        return _multiple(function(_plain(self), _plain(other)), self.power + sign * power)

    return method


for _name, _sign in {"mul": 1, "truediv": -1, "floordiv": -1}.items():
    for _reflected in (False, True):
        setattr(
            _Multiple,
            f"__{'r' * _reflected}{_name}__",
            _operator(getattr(operator, _name), _sign, is_reflected=_reflected),
        )
