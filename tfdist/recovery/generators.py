"""Random generators outside of a model: Python's, NumPy's, Keras' and TensorFlow's global ones.

What is restored: `random`, `numpy.random`'s global generator, the seed generator that Keras' layers and operations draw
from where they were given no seed, and `tf.random.get_global_generator()`. What is not: generators that a program made
for itself (`np.random.default_rng()`; a callback with `get_state` and `set_state` can keep them), and TensorFlow's
stateful operations (`tf.random.uniform`, `tf.random.normal`, `tf.image.random_*`, ...): each keeps a counter inside its
kernel that nobody can read or set. Use `keras.random`, `tf.random.Generator` or `tf.random.stateless_*` in their place.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras_internals.global_seed import (
    forget_global_seed_generator,
    global_seed_generator,
    make_global_seed_generator,
)
from tfdist.keras_internals.random_states import global_states, packed, set_global_states, unpacked
from tfdist.tensorflow_internals.global_generator import global_generator

Json = dict[str, Any]

_KERAS, _TENSORFLOW = "keras", "tensorflow"


def python_and_numpy_state() -> Json:
    """The states of `random` and of `numpy.random`, as JSON.

    >>> import random
    >>> from tfdist.recovery.generators import python_and_numpy_state, restore
    >>> state = python_and_numpy_state()
    >>> before = random.random(), np.random.random()
    >>> restore(state)
    >>> (random.random(), np.random.random()) == before
    True
    """
    return {name: packed(state) for name, state in global_states().items()}


def check(state: Json) -> None:
    """Raises an error if `restore` could not restore `state`.

    Raises:
      ValueError: NumPy's global generator is of another kind.
    """
    saved = unpacked(state["numpy"])["bit_generator"]
    present = np.random.get_state(legacy=False)["bit_generator"]
    if saved != present:
        raise ValueError(
            f"NumPy's global generator is of another kind than in the checkpoint. Received: {saved} in the checkpoint. "
            f"Expected: {present}, as in this program. Call `np.random.set_bit_generator` as the program did before."
        )


def restore(state: Json) -> None:
    """Puts the states back. To be called last of all: building models and seed generators draws from `random`."""
    set_global_states({name: unpacked(text) for name, text in state.items()})


def generator_variables() -> dict[str, Any]:
    """The state variables of Keras' and TensorFlow's global generators, of those that exist."""
    found = {}
    if (generator := global_seed_generator()) is not None:
        found[_KERAS] = generator.state
    if (generator := global_generator()) is not None:
        found[_TENSORFLOW] = generator.state
    return found


def make_as_saved(names: Iterable[str], strategy: Any) -> None:
    """Makes the global generators that are named and missing, and forgets Keras' if it is not named.

    A generator of Keras' that the checkpoint does not know would be made, after it, from Python's `random`.

    Args:
      names: the keys of `generator_variables` when the checkpoint was made.
      strategy: the one that the generator's variable is made under.
    """
    names = set(names)
    if _KERAS not in names:
        forget_global_seed_generator()
    with strategy.scope():
        if _KERAS in names:
            make_global_seed_generator()
        if _TENSORFLOW in names:
            tf.random.get_global_generator()
