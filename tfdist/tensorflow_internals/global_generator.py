"""TensorFlow's global random generator, if a program uses it."""

from typing import Any

from tfdist.private_symbols import private

_random_ops = private(
    "tensorflow.python.ops:stateful_random_ops", "tells whether there is a global generator without making one"
)


def global_generator() -> Any:
    """The `tf.random.Generator`, or `None` as long as nothing has asked for it."""
    return _random_ops.global_generator
