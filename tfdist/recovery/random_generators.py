"""Saves and restores random generators outside of the model: the global ones of Python, NumPy, Keras and TensorFlow.

Restored are `random`, the global generator of `numpy.random`, the seed generator from which Keras' layers and
operations draw if they have no seed, and `tf.random.get_global_generator()`.

Not restored are generators that a program creates (`np.random.default_rng()`; a callback with `get_state` and
`set_state` can save them), and TensorFlow's stateful operations (`tf.random.uniform`, `tf.random.normal`,
`tf.image.random_*`, ...): each has a counter in its kernel that cannot be read or set. Use `keras.random`,
`tf.random.Generator` or `tf.random.stateless_*` instead.
"""

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data_position.python_randomness import global_states, set_global_states, states_equal
from tfdist.keras_internals.seed_generators import (
    forget_global_seed_generator,
    global_seed_generator,
    make_global_seed_generator,
)
from tfdist.tensorflow_internals.runtime import global_generator
from tfdist.utils.json_state import from_text, to_text

Json = dict[str, Any]

_KERAS, _TENSORFLOW = "keras", "tensorflow"


def python_and_numpy_state() -> Json:
    """Returns the states of `random` and `numpy.random`, as JSON.

    >>> import random
    >>> from tfdist.recovery.random_generators import python_and_numpy_state, restore_python_and_numpy
    >>> state = python_and_numpy_state()
    >>> before = random.random(), np.random.random()
    >>> restore_python_and_numpy(state)
    >>> (random.random(), np.random.random()) == before
    True
    """
    return {name: to_text(state) for name, state in global_states().items()}


def check_python_and_numpy(state: Json) -> None:
    """Checks that `restore_python_and_numpy` can restore `state`.

    Raises:
        ValueError: If the global NumPy generator has another bit generator.
    """
    saved = from_text(state["numpy"])["bit_generator"]
    present = np.random.get_state(legacy=False)["bit_generator"]
    if saved != present:
        raise ValueError(
            f"The global NumPy generator differs from that of the checkpoint. Received: {saved} in the checkpoint. "
            f"Expected: {present}, as in this program. Call `np.random.set_bit_generator` as the original program did."
        )


def restore_python_and_numpy(state: Json) -> None:
    """Restores the states. Call this last: building models and seed generators draws from `random`."""
    set_global_states({name: from_text(text) for name, text in state.items()})


def drawn_before_fit(seed: int | None) -> Json:
    """Returns what shows whether a program draws other numbers before `fit` than the run that saved a checkpoint.

    Returns:
        `seed`: that of the run; None: unknown. `numpy`: a hash of the state of NumPy's global generator; None: nobody
        has drawn from it since it was seeded. Keras draws from Python's generator itself, so that shows nothing.
    """
    state = np.random.get_state(legacy=False)
    is_unused = seed is not None and states_equal(state, np.random.RandomState(seed).get_state(legacy=False))
    return {"seed": seed, "numpy": None if is_unused else zlib.crc32(to_text(state).encode())}


def generator_variables() -> dict[str, Any]:
    """Returns the state variables of the global generators of Keras and TensorFlow, if these exist."""
    states = {}
    if (generator := global_seed_generator()) is not None:
        states[_KERAS] = generator.state
    if (generator := global_generator()) is not None:
        states[_TENSORFLOW] = generator.state
    return states


def create_generators(names: Mapping[str, bool], strategy: Any) -> None:
    """Creates the global generators that are named and missing, and removes that of Keras if it is not named.

    If the checkpoint has none, the original run created it later, from Python's `random`, and so must this one. `names`
    say whether several replicas had it, which the scope of the strategy gives it to.
    """
    if _KERAS not in names:
        forget_global_seed_generator()
    for name, create in ((_KERAS, make_global_seed_generator), (_TENSORFLOW, tf.random.get_global_generator)):
        if name in names:
            with strategy.scope() if names[name] else contextlib.nullcontext():
                create()
