"""Whether Keras or the program creates a `tf.Variable`."""

import contextvars
import functools
from typing import Any

from tfdist.keras_internals.keras_symbols import Variable

_is_creating = contextvars.ContextVar("tfdist_keras_creates_variable", default=False)


def keras_creates_variable() -> bool:
    """Whether the `tf.Variable` that is being created is the value of a Keras variable."""
    return _is_creating.get()


def patch_variable_creation() -> None:
    """Makes Keras variables mark the creation of their `tf.Variable`."""
    stock = Variable._initialize

    @functools.wraps(stock)
    def initialize(self: Any, value: Any) -> None:
        token = _is_creating.set(True)
        try:
            stock(self, value)
        finally:
            _is_creating.reset(token)

    Variable._initialize = initialize
